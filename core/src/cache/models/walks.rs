//! Models of an invalidation that walks the table while another thread alters the table.

use std::sync::Arc;

use loom::thread;

use super::{
    super::{
        index::radix::{Radix, RadixState},
        sync::modelled::GENERATION,
    },
    fails_without, holds, model, reach,
};

const UNSEEN: &str = "a walk missed an entry";

/// Runs a model: one thread walks all pages up to `last`, while another thread runs `alter` on the
/// table. `put` lists the entries that the table has at the start, each as its first page, last
/// page and index. `alter` must keep entry 1 and remove entry 2.
fn walk_beside(put: &'static [(u64, u64, u32)], last: u64, alter: fn(&Radix, &mut RadixState)) {
    model(move || {
        let (radix, mut state) = Radix::new(4).expect("a table");
        for (first, last, entry) in put {
            assert!(radix.insert(&mut state, *first, *last, *entry));
        }
        let radix = Arc::new(radix);
        let walker = {
            let radix = Arc::clone(&radix);
            thread::spawn(move || {
                let mut seen = (false, false);
                radix.walk(0, last, &mut |entry| {
                    seen = (seen.0 || entry == 1, seen.1 || entry == 2)
                });
                assert!(seen.0, "{UNSEEN}");
                reach(seen.1);
            })
        };
        alter(&radix, &mut state);
        walker.join().unwrap();
    });
}

/// Runs a model: one thread walks the table, while another takes the chain of the first page apart
/// and reuses the chain's bucket for the next page.
fn walk_against_an_alteration() {
    walk_beside(&[(0, 0, 1), (0, 0, 2)], 0, |radix, state| {
        radix.remove(state, 0, 0, 2);
        for entry in [3, 4] {
            assert!(radix.insert(state, 1, 1, entry));
        }
    });
}

#[test]
fn walk_visits_entries_that_stay_while_a_chain_is_reused() {
    holds(walk_against_an_alteration);
}

#[test]
fn walk_visits_entries_that_stay_in_a_chain_of_two_buckets() {
    holds(|| {
        walk_beside(&[(0, 0, 1), (0, 0, 2), (0, 0, 3)], 0, |radix, state| {
            radix.remove(state, 0, 0, 2);
            radix.remove(state, 0, 0, 3);
            for entry in [4, 5] {
                assert!(radix.insert(state, 1, 1, entry));
            }
        });
    });
}

#[test]
fn walk_visits_entries_that_stay_while_a_node_is_reused() {
    holds(|| {
        walk_beside(&[(2, 3, 1), (0, 0, 2)], 3, |radix, state| {
            radix.remove(state, 0, 0, 2);
            radix.prune(state, 0);
            // This reuses the freed node of the first two pages. The node is now below a chain that
            // also holds entry 1.
            assert!(radix.insert(state, 2, 2, 3));
            radix.remove(state, 2, 2, 3);
        });
    });
}

#[test]
fn walk_fails_without_generations() {
    fails_without(GENERATION, walk_against_an_alteration, &[UNSEEN]);
}
