"""Parts that the commands share: options, errors, terminal output, chat."""
