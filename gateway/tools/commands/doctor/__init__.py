"""`outrider doctor`: checks whether Outrider can run here."""
