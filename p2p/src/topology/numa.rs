//! NUMA nodes and their CPUs.

use hmem_core::Result;

use super::source::Source;

/// Maximum number of NUMA nodes (`CONFIG_NODES_SHIFT` is at most 10).
pub(super) const MOST_NODES: u32 = 1024;

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NumaNode {
    /// Number of the NUMA node in the kernel.
    pub id: u32,
    /// CPU numbers as a list of ranges, as in `0-15,128-143`. Empty for a node with memory only.
    pub cpus: String,
}

pub(super) fn read_all(source: &Source) -> Result<Vec<NumaNode>> {
    const FOLDER: &str = "sys/devices/system/node";
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
        nodes.push(NumaNode { id, cpus });
    }
    nodes.sort_by_key(|node| node.id);
    Ok(nodes)
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
    fn lists_of_processors_are_ranges() {
        assert!(is_ranges("0-15,128-143") && is_ranges("3") && is_ranges(""));
        assert!(
            !is_ranges("0-") && !is_ranges(",") && !is_ranges("a-b") && !is_ranges("0-99999999999")
        );
    }
}
