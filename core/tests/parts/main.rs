//! Tests of keys, the registry and subscriptions.

mod corpus;
mod free_subscriptions;
mod key_feed;
mod key_parts;
mod rail_keys;
#[path = "../../../tests/corpus/reader.rs"]
mod reader;
mod registry;
