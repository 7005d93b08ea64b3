//! The mapping of an exported dma-buf.

/// The route by which a NIC that imports a dma-buf reaches the device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DmaBufMapping {
    /// The route that the driver prefers.
    #[default]
    Default,
    /// The route through the PCIe BAR, even where a faster coherent link exists.
    Pcie,
}
