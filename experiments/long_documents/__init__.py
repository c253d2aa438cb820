"""Classification of long documents: what reading more of one is worth."""
