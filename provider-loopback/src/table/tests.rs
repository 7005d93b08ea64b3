//! The table by itself.

use hmem_core::{Access, Addressing};

use super::*;
use crate::{keys::KnownGeneration, region::Kind};

const DOMAIN: DomainSlot = DomainSlot { id: 7, slot: 0 };
const BIRTH: Birth = Birth { enabled: true, single_use: false, pages: true };

fn table(narrow: bool) -> Table {
    let table = Table::new(1, narrow);
    table.admit(DOMAIN);
    table
}

fn body() -> NewBody {
    NewBody {
        base: 4096,
        len: 64,
        extended: None,
        access: Access::REMOTE_READ,
        kind: Kind::Borrowed,
        addressing: Addressing::ZeroBased,
    }
}

#[test]
fn a_token_is_good_for_one_life() {
    let table = table(false);
    let first = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
    table.remove(DOMAIN, first, true).unwrap();
    let second = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
    assert_eq!(first.index, second.index);
    let hold = |token: Token| {
        let known = KnownGeneration::Whole(token.generation);
        table.hold(token.index, known, true).map(|held| held.token)
    };
    assert_eq!(hold(first).unwrap_err(), Refusal::Dead);
    assert_eq!(hold(second).unwrap(), second);
    assert!(!table.is_live(DOMAIN.id, first) && table.is_live(DOMAIN.id, second));
    assert!(table.remove(DOMAIN, first, true).is_err());
    assert!(table.remove(DomainSlot { id: 8, slot: 0 }, second, true).is_err());
}

#[test]
fn of_two_that_hold_a_single_use_region_one_may_use_it() {
    let table = table(false);
    let birth = Birth { single_use: true, ..BIRTH };
    table.insert_requested(DOMAIN, 1, body(), birth).unwrap();
    let hold = || table.hold_requested(DOMAIN.id, 1, true);
    let (one, two) = (hold().unwrap(), hold().unwrap());
    assert!(one.spend() && !two.spend());
    assert_eq!(hold().unwrap_err(), Refusal::Dead);
    table.hold(one.token.index, KnownGeneration::Whole(one.token.generation), false).unwrap();
}

#[test]
fn narrow_tables_reuse_the_oldest_index_and_only_after_a_rest() {
    let table = table(true);
    let keys = DomainKeys::new(4).unwrap();
    let mut last_seen = std::collections::HashMap::new();
    for round in 0..10 * RESTING {
        let (token, key) = table.insert_sealed(DOMAIN, &keys, body(), BIRTH).unwrap();
        assert_eq!(key >> 8, u64::from(token.index));
        if let Some(before) = last_seen.insert(token.index, round) {
            assert!(
                round - before >= RESTING,
                "index {} came back after {}",
                token.index,
                round - before
            );
        }
        table.remove(DOMAIN, token, false).unwrap();
    }
    assert!(last_seen.len() <= RESTING as usize + 1);
}

#[test]
fn an_index_whose_generations_are_used_up_is_retired() {
    let table = table(false);
    let token = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
    table.remove(DOMAIN, token, true).unwrap();
    let last = u64::from(u32::MAX) << GENERATION_SHIFT;
    table.known(token.index).life.store(last, Ordering::Relaxed);
    let old = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
    assert_eq!((old.index, old.generation), (token.index, u32::MAX));
    table.remove(DOMAIN, old, true).unwrap();
    let next = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
    assert_ne!(next.index, token.index);
}
