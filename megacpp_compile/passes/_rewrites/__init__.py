"""What passes emit, and what of it several of them share. No pass is here, and none is found here."""
