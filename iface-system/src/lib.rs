//! iface-system
