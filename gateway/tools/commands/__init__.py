"""Commands: serving, chat, doctor, fleet, and those on the database."""
