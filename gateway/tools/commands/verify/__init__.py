"""`outrider verify`: is an answer what its receipt says?"""
