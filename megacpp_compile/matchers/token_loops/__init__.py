"""Recurrences that a graph holds as a loop over tokens, unrolled: one step is proved, and all steps are alike."""
