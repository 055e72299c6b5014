"""What this library raises. Every message is one sentence a user can act on."""


class DPMicroAdamError(Exception):
    """Base of all errors of this library; the command line turns one into a sentence and exit code 1."""


class InputError(DPMicroAdamError, ValueError):
    """A value that cannot be used. The message names it and says what would be right; exit code 2."""


class PrivacyError(DPMicroAdamError):
    """Going on would break the privacy guarantee, so this library does not; exit code 1."""


class PrivacyWarning(UserWarning):
    """The guarantee holds as computed, and may not mean what its reader takes it to mean."""
