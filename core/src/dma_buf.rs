//! The mapping of an exported dma-buf.

/// The mapping of device memory for the importer of a dma-buf (HM-09).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DmaBufMapping {
    /// The driver's default.
    #[default]
    Default,
    /// Through the PCIe BAR, even where a faster coherent link exists.
    Pcie,
}
