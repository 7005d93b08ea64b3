//! iface-cuda
