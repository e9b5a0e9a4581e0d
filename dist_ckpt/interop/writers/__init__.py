"""What writers of other systems' files share: whole and durable, or not at all."""
