//! KEY-01 to KEY-06: requesting, closing, sending and mapping keys.

use hmem::{Addressing, ErrorKind, Iova, RemoteKey};

use crate::{
    child,
    config::{TestConfig, over_configs},
    net::{Net, REMOTE},
};

over_configs! {
    /// KEY-06
    a_key_crosses_processes_unchanged: HardwareMode;
}

const SENT: &str = "HMEM_TEST_KEY";

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn a_key_crosses_processes_unchanged(config: &TestConfig) {
    const NAME: &str = "key::over_configs::a_key_crosses_processes_unchanged";
    if child::is_alone(NAME) {
        let text = std::env::var(SENT).expect("the key");
        let bytes: Vec<_> = (0..text.len() / 2)
            .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal"))
            .collect();
        let key = RemoteKey::from_bytes(&bytes).expect("the key as it was sent");
        let piece = key.pieces().next().expect("a piece");
        println!(
            "received {} {:?} {:#x} {}",
            key.as_u64().unwrap(),
            key.addressing(),
            piece.base.0,
            piece.len
        );
        return;
    }
    let net = Net::open(config);
    let memory = net.bytes(64);
    let key = net.expose(memory.range(), REMOTE).key().expect("key");
    let output = child::output(NAME, &[(SENT, &hexadecimal(&key.to_bytes()))]);
    let text = String::from_utf8_lossy(&output.stdout);
    let expected =
        format!("received {} Virtual {:#x} 64", key.as_u64().unwrap(), memory.range().start().0);
    assert!(text.contains(&expected), "{expected:?} is not in {text}");
}

/// KEY-06
#[test]
fn truncated_and_altered_keys_are_refused() {
    let piece = |base| hmem::RemotePiece { base: Iova(base), len: 4096, key: base ^ 0x5A5A };
    for key in [
        RemoteKey::new(Addressing::ZeroBased, Iova(0), 1, 0),
        RemoteKey::new(Addressing::Virtual, Iova(u64::MAX), u64::MAX, u64::MAX),
        RemoteKey::split(Addressing::Virtual, piece(1 << 40), vec![piece(2 << 40), piece(3 << 40)]),
    ] {
        let bytes = key.to_bytes();
        assert_eq!(RemoteKey::from_bytes(&bytes).expect("unchanged"), key);
        assert_eq!(&bytes[..5], b"hmRK\x01", "the form says what it is and which version");
        let refused = |bytes: &[u8], what: &str| {
            let error = RemoteKey::from_bytes(bytes)
                .err()
                .unwrap_or_else(|| panic!("{what} was read as a key"));
            assert_eq!(error.kind(), ErrorKind::Malformed);
            assert!(error.context_value("why").is_some());
        };
        for len in 0..bytes.len() {
            refused(&bytes[..len], "a truncated key");
        }
        refused(&[&bytes[..], &[0]].concat(), "a key with a byte left over");
        for bit in 0..bytes.len() * 8 {
            let mut altered = bytes.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            refused(&altered, "an altered key");
        }
    }
    assert_eq!(RemoteKey::from_bytes(b"hmRK\x02").unwrap_err().kind(), ErrorKind::Malformed);
}
