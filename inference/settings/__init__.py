"""What a user may say of decoding and measuring; light, so that a mistake shows before torch is imported."""
