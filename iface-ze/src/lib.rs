//! iface-ze
