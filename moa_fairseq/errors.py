"""The one exception that a user is meant to read."""


class UserError(Exception):
    """Something the user can put right: bad flag, file or data.

    The message is one paragraph: it names the flag, file or line at fault and the remedy. The
    command line prints it without a traceback and exits with status 2.
    """
