"""The methods that recipes choose from: each says how optimizer and privacy parts are wired into the trainer."""
