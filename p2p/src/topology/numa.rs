//! NUMA nodes and their processors.

use hmem_core::Result;

use super::source::Source;

/// Node numbers are below this (`CONFIG_NODES_SHIFT` is at most 10).
pub(super) const MOST_NODES: u32 = 1024;

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Its processors as ranges, as in `0-15,128-143`; empty for a node of memory alone.
    pub cpus: String,
}

pub(super) fn read_all(source: &Source) -> Result<Vec<NumaNode>> {
    const FOLDER: &str = "sys/devices/system/node";
    let mut nodes = Vec::new();
    for name in source.names(FOLDER)?.unwrap_or_default() {
        let Some(digits) = name.strip_prefix("node") else { continue };
        let path = format!("{FOLDER}/{name}/cpulist");
        let Some(id) = digits.parse().ok().filter(|id| *id < MOST_NODES) else {
            return Err(source.malformed(&format!("{FOLDER}/{name}"), "no NUMA node"));
        };
        let cpus = source.text(&path)?.unwrap_or_default();
        if !is_ranges(&cpus) {
            return Err(source.malformed(&path, format_args!("no list of processors: {cpus:.60}")));
        }
        nodes.push(NumaNode { id, cpus });
    }
    nodes.sort_by_key(|node| node.id);
    Ok(nodes)
}

/// `0-15,128-143`, or nothing at all.
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
