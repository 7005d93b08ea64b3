//! The NICs that are nearest to memory.

use hmem_core::{AddressRange, Domain, Error, ErrorKind, IfaceKind, Result, provider::Nic};
use hmem_iface_system::numa_node;
use hmem_p2p::topology::{Locality, NearestNics, Topology};

use crate::builder::Hmem;

const OPERATION: &str = "nearest NICs";

impl Hmem {
    /// Chooses from the NICs of `domains` the `count` NICs that are nearest to `memory`.
    /// [`Topology::choose_nics`] defines the order of the NICs, including NICs that are equally
    /// near.
    ///
    /// For device memory, the distance is from the device to the NIC. For memory that the CPU can
    /// access, the distance is from the NUMA node with most of the memory's pages to the NIC
    /// ([`numa_node`]).
    ///
    /// # Errors
    /// - The errors of [`Topology::choose_nics`] and [`Hmem::topology`].
    /// - [`ErrorKind::Unsupported`] for memory of a device without a PCI address.
    /// - The errors of [`numa_node`], on a machine of several NUMA nodes.
    /// - [`ErrorKind::OutOfBounds`] for a range that leaves its allocation.
    /// - The error of a driver that fails to list devices or to find the owner of the memory.
    ///
    /// # Examples
    ///
    /// [Exchange keys](crate::guide::keys#several-nics) has a complete program.
    ///
    /// ```no_run
    /// use hmem::{Access, Batch, DeviceBuffer, Domain, Hmem, Regions, Request};
    ///
    /// /// Registers a buffer with the two NICs that are nearest to it.
    /// fn expose(
    ///     hmem: &Hmem,
    ///     domains: &[&Domain],
    ///     buffer: DeviceBuffer,
    /// ) -> hmem::Result<Regions<DeviceBuffer>> {
    ///     let choice = hmem.nearest_nics(domains, buffer.range(), 2)?;
    ///     println!("{choice}");
    ///     let request = Request::new(buffer, Access::REMOTE_READ);
    ///     Ok(Batch::on(&choice.pick(domains)).add(request).register()?)
    /// }
    /// ```
    pub fn nearest_nics(
        &self,
        domains: &[&Domain],
        memory: AddressRange,
        count: usize,
    ) -> Result<NearestNics> {
        let topology = self.topology()?;
        let locality = self.locality(topology, memory)?;
        let nics: Vec<&Nic> = domains.iter().map(|domain| &domain.provider_attr().nic).collect();
        topology.choose_nics(locality, &nics, count)
    }

    /// Returns the locality of memory: its device or its NUMA node.
    fn locality(&self, topology: &Topology, memory: AddressRange) -> Result<Locality> {
        let owner = self.registry().owner_of_range(memory)?;
        let by_cpu = owner.allocation.is_none_or(|allocation| allocation.kind.cpu_accessible());
        let device = match owner.device {
            Some(device) if owner.iface != IfaceKind::SYSTEM && !by_cpu => device,
            _ => return host_locality(topology, memory),
        };
        let known = self.registry().get(owner.iface)?.devices()?;
        let address = known.into_iter().find(|known| known.id == device);
        let Some(address) = address.and_then(|device| device.pci_bus_id) else {
            return Err(Error::new(ErrorKind::Unsupported, OPERATION)
                .iface(self.registry().name_of(owner.iface))
                .device(device)
                .context("why", "the device has no PCI address, so its distance is not known")
                .remedy("choose the NICs yourself, and register with Batch::on"));
        };
        Ok(Locality::Device(address.parse()?))
    }
}

/// Returns the NUMA node of memory that the CPU can access.
fn host_locality(topology: &Topology, memory: AddressRange) -> Result<Locality> {
    match topology.numa() {
        // A container may forbid the system call of `numa_node`, so it is made only if necessary.
        [] => Ok(Locality::Node(0)),
        [one] => Ok(Locality::Node(one.id)),
        _ => numa_node(memory).map(Locality::Node),
    }
}
