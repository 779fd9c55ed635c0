"""The policy's engine as the rest of clawhpc sees it: token ids in, token ids out, and the text on either side."""
