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
    /// The route through the PCIe BAR and the Data Direct function of an mlx5 NIC, which is a
    /// second PCI function of the NIC near the device. The device exports the same dma-buf as for
    /// [`Pcie`](Self::Pcie), but the NIC registers it in another way.
    DataDirect,
}

impl DmaBufMapping {
    /// Returns the mapping with which a device exports memory for this route: [`Pcie`](Self::Pcie)
    /// for [`DataDirect`](Self::DataDirect), and otherwise the mapping itself.
    #[must_use]
    pub const fn of_export(self) -> Self {
        match self {
            Self::Default => Self::Default,
            Self::Pcie | Self::DataDirect => Self::Pcie,
        }
    }
}
