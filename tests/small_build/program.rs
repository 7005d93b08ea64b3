//! A program that registers a buffer with the first RDMA NIC. `tests/small_build/run` builds it.

use hmem::{Access, DomainAttr, Hmem, Result, verbs::VerbsMr};

fn main() -> Result<()> {
    let hmem = Hmem::builder().verbs().build()?;
    let nics = hmem.nics("verbs")?;
    let nic = nics.first().map(|attr| attr.nic.to_string()).unwrap_or_default();
    let domain = hmem.domain(&nic, DomainAttr::default())?;
    let region = domain.register(vec![0u8; 4096], Access::REMOTE_WRITE)?;
    println!("{}\nrkey {:#x}", region.decision()?, VerbsMr::of(&region)?.rkey);
    region.close()?;
    Ok(())
}
