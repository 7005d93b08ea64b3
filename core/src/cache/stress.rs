//! Races on real processors, and that the barrier is what they need.
