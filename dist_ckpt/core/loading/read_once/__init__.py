"""What several ranks want is fetched once, checked, and handed on."""
