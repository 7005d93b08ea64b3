//! Tests that keys of earlier versions can still be read.

use crate::reader;
use hmem_core::{Addressing, Iova, RailKey, RailKeys, RemoteKey, provider::Nic};

fn key_text(key: &RemoteKey) -> String {
    let piece = |piece: &hmem_core::RemotePiece| {
        format!("{:#x}+{:#x} key {:#x}", piece.base.0, piece.len, piece.key)
    };
    let addressing = match key.addressing() {
        Addressing::ZeroBased => "zero-based",
        Addressing::Virtual => "virtual",
    };
    format!("{addressing} {}", key.pieces().map(piece).collect::<Vec<_>>().join(", "))
}

/// KEY-06: The current code reads remote keys that every earlier version wrote.
#[test]
fn remote_keys_of_all_versions_are_read() {
    let current = RemoteKey::new(Addressing::ZeroBased, Iova(0), 1, 1).to_bytes()[4];
    reader::check("remote-key", 1..=u32::from(current), |bytes| {
        key_text(&RemoteKey::from_bytes(bytes).expect("a remote key"))
    });
}

/// KEY-06: The current code reads rail keys that every earlier version wrote.
#[test]
fn rail_keys_of_all_versions_are_read() {
    let nic = Nic { provider: "p".into(), name: "n".into(), pci_bus_id: None };
    let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 1, 1);
    let current = RailKeys::new(vec![RailKey::new(nic, key)]).expect("rail keys").to_bytes()[4];
    reader::check("rail-keys", 1..=u32::from(current), |bytes| {
        let rail = |RailKey { nic, key, .. }: &RailKey| {
            let at = nic.pci_bus_id.as_deref().unwrap_or("-");
            format!("{nic} at {at}: {}", key_text(key))
        };
        let keys = RailKeys::from_bytes(bytes).expect("rail keys");
        keys.rails().iter().map(rail).collect::<Vec<_>>().join("; ")
    });
}
