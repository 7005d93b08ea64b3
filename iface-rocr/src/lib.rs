//! iface-rocr
