"""The exceptions and warnings of this library. Every message is one sentence a user can act on."""


class DPMicroAdamError(Exception):
    """Base class of all errors of this library. The command line prints the message and exits with code 1."""


class InputError(DPMicroAdamError, ValueError):
    """An invalid argument, file or setting. The message names the value and says what is allowed; exit code 2."""


class PrivacyError(DPMicroAdamError):
    """Raised instead of continuing where continuing would break the privacy guarantee; exit code 1."""


class UnreadableExample(PrivacyError):
    """Raised by code of ours that reads an example which cannot be used; the message names none, so that it may be shown."""


class PrivacyWarning(UserWarning):
    """Warns that the guarantee holds as computed, but may be weaker than a reader would expect."""
