"""What the commands share: options, errors, terminal output, chat."""
