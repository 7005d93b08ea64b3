//! NUMA nodes, their CPUs and memory.

use std::collections::BTreeSet;

use hmem_core::Result;

use super::{Topology, source::Source};

/// Maximum number of NUMA nodes (`CONFIG_NODES_SHIFT` is at most 10).
pub(super) const MOST_NODES: u32 = 1024;

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NumaNode {
    /// Number of the NUMA node in the kernel.
    pub id: u32,
    /// CPU numbers as a list of ranges, as in `0-15,128-143`. Empty for a node without CPUs.
    pub cpus: String,
    /// True if the node has memory; `None` if the kernel does not report it.
    pub memory: Option<bool>,
    /// Distances to all nodes, in the order of their numbers and in the kernel's unit (10 for the
    /// node itself). Empty if the kernel does not report them.
    pub distances: Vec<u32>,
}

impl NumaNode {
    /// Returns true if the node has memory and no CPUs. Such a node is memory of a GPU with
    /// NVLink-C2C, or of a CXL device, that the kernel uses as host memory.
    #[must_use]
    pub fn is_memory_only(&self) -> bool {
        self.cpus.is_empty() && self.memory == Some(true)
    }
}

impl Topology {
    /// Returns the nearest node with CPUs: the node itself if it has CPUs. Returns `None` if the
    /// machine does not have the node, or if its distances are unknown. Of equally near nodes, the
    /// one with the lowest number is returned.
    #[must_use]
    pub fn nearest_cpu_node(&self, node: u32) -> Option<u32> {
        let from = self.numa.iter().find(|known| known.id == node)?;
        let distances = self.numa.iter().zip(&from.distances);
        let with_cpus = distances.filter(|(other, _)| !other.cpus.is_empty());
        let nearest = with_cpus.min_by_key(|(_, distance)| **distance);
        if from.cpus.is_empty() { nearest.map(|(other, _)| other.id) } else { Some(node) }
    }

    /// Returns true if at most one NUMA node has CPUs.
    pub(super) fn has_one_cpu_node(&self) -> bool {
        self.numa.iter().filter(|node| !node.cpus.is_empty()).count() <= 1
    }
}

pub(super) const FOLDER: &str = "sys/devices/system/node";
/// The file that lists the nodes with memory.
pub(super) const HAS_MEMORY: &str = "sys/devices/system/node/has_memory";

pub(super) fn read_all(source: &Source) -> Result<Vec<NumaNode>> {
    let with_memory = source.parsed(HAS_MEMORY, |text| match is_ranges(text) {
        true => Ok(text.to_owned()),
        false => Err(format!("not a list of NUMA nodes: {text:.60}")),
    })?;
    let mut nodes = Vec::new();
    for name in source.names(FOLDER)?.unwrap_or_default() {
        let Some(digits) = name.strip_prefix("node") else { continue };
        let path = format!("{FOLDER}/{name}/cpulist");
        let Some(id) = digits.parse().ok().filter(|id| *id < MOST_NODES) else {
            return Err(
                source.malformed(&format!("{FOLDER}/{name}"), "not the name of a NUMA node")
            );
        };
        let cpus = source.text(&path)?.unwrap_or_default();
        if !is_ranges(&cpus) {
            return Err(
                source.malformed(&path, format_args!("not a list of processors: {cpus:.60}"))
            );
        }
        let memory = with_memory.as_deref().map(|list| lists(list, id));
        let distances = source.parsed(&format!("{FOLDER}/{name}/distance"), distances)?;
        nodes.push(NumaNode { id, cpus, memory, distances: distances.unwrap_or_default() });
    }
    nodes.sort_by_key(|node| node.id);
    Ok(nodes)
}

/// Returns the numbers of nodes without CPUs that have memory.
pub(super) fn memory_only(source: &Source) -> Result<BTreeSet<u32>> {
    let nodes = read_all(source)?;
    Ok(nodes.iter().filter(|node| node.is_memory_only()).map(|node| node.id).collect())
}

/// Parses a line of distances, as in `10 40 80`.
fn distances(text: &str) -> std::result::Result<Vec<u32>, String> {
    let number = |word: &str| word.parse().ok().filter(|distance| *distance <= 255);
    let numbers = text.split_whitespace().map(number).take(MOST_NODES as usize);
    numbers.collect::<Option<_>>().ok_or_else(|| format!("not a list of distances: {text:.60}"))
}

/// Returns true if a list of ranges, such as `0-1,5`, contains `number`.
fn lists(list: &str, number: u32) -> bool {
    list.split(',').any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let bound = |text: &str| text.parse::<u32>().ok();
        bound(first).zip(bound(last)).is_some_and(|(first, last)| (first..=last).contains(&number))
    })
}

/// Returns whether `text` is empty or a list such as `0-15,128-143`.
fn is_ranges(text: &str) -> bool {
    let number = |text: &str| text.len() < 8 && text.parse::<u32>().is_ok();
    text.is_empty()
        || text.split(',').all(|range| match range.split_once('-') {
            Some((first, last)) => number(first) && number(last),
            None => number(range),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_small_numbers() {
        assert_eq!(distances("10 40 80\n"), Ok(vec![10, 40, 80]));
        assert!(
            distances("10 x").is_err() && distances("-1").is_err() && distances("256").is_err()
        );
    }

    #[test]
    fn a_list_contains_the_numbers_of_its_ranges() {
        let listed = |list| (0..8).filter(|number| lists(list, *number)).collect::<Vec<_>>();
        assert_eq!((listed("0,2-4,7"), listed("")), (vec![0, 2, 3, 4, 7], vec![]));
    }

    #[test]
    fn lists_of_processors_are_ranges() {
        assert!(is_ranges("0-15,128-143") && is_ranges("3") && is_ranges(""));
        assert!(
            !is_ranges("0-") && !is_ranges(",") && !is_ranges("a-b") && !is_ranges("0-99999999999")
        );
    }
}
