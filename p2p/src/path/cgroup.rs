//! Limits of RDMA objects of the process's control groups.

use hmem_core::cause::Facts;

/// The two hierarchies of control groups that can limit RDMA objects: version 2, and the RDMA
/// controller of version 1. The fields of a hierarchy are the controllers in its line of
/// `/proc/self/cgroup`, the folder with its groups, and the name of a file that each group has.
const VERSIONS: [(&str, &str, &str); 2] =
    [("", "sys/fs/cgroup", "cgroup.controllers"), ("rdma", "sys/fs/cgroup/rdma", "cgroup.procs")];

/// The limits of RDMA objects that the process's control groups have.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RdmaLimit {
    /// A group has reached its limit. The text has the group, the device and the numbers.
    Reached(String),
    /// No group has reached a limit.
    NotReached,
    /// The groups cannot be read, or a container hides the groups above its own.
    Unknown,
}

/// Reads the limits of RDMA objects of all control groups of the process.
pub(super) fn rdma_limit(facts: &Facts) -> RdmaLimit {
    let own = facts.text("proc/self/cgroup").unwrap_or_default();
    let mut known = RdmaLimit::Unknown;
    for (controllers, mount, in_every_group) in VERSIONS {
        let group = own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            (fields.next()? == controllers).then_some(fields.next()?)
        });
        let Some(group) = group else { continue };
        // A container does not see the groups above its own, which is its root. The root of the
        // machine is not limited, and has no such file.
        let root_is_limited = facts.text(&format!("{mount}/cgroup.type")).is_some();
        if facts.text(&format!("{mount}/{in_every_group}")).is_none() {
            return RdmaLimit::Unknown;
        }
        let mut path = group.trim_end_matches('/');
        loop {
            if let Some(reached) = reached_by(facts, &format!("{mount}{path}")) {
                let group = if path.is_empty() { "/" } else { path };
                return RdmaLimit::Reached(format!("group {group}: {reached}"));
            }
            let Some(end) = path.rfind('/') else { break };
            path = &path[..end];
        }
        if root_is_limited {
            return RdmaLimit::Unknown;
        }
        known = RdmaLimit::NotReached;
    }
    known
}

/// Returns the first device whose number of objects has reached the group's limit, with the
/// numbers. The file `rdma.max` has the limits, and `rdma.current` has the present numbers. Each
/// file has one line for each device, such as `mlx5_0 hca_handle=2 hca_object=2000`. The limit
/// `max` means no limit.
fn reached_by(facts: &Facts, group: &str) -> Option<String> {
    let read = |file| facts.text(&format!("{group}/{file}")).unwrap_or_default();
    let (limits, current) = (read("rdma.max"), read("rdma.current"));
    let objects = |text: &str, device: &str| {
        let mut words = text.lines().map(str::split_whitespace);
        let mut fields = words.find_map(|mut line| (line.next()? == device).then_some(line))?;
        fields.find_map(|field| field.strip_prefix("hca_object=")?.parse::<u64>().ok())
    };
    limits.lines().filter_map(|line| line.split_whitespace().next()).find_map(|device| {
        let (limit, used) = (objects(&limits, device)?, objects(&current, device)?);
        (used >= limit).then(|| format!("{device} has {used} of {limit} objects"))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn full_group_is_found_among_the_groups_above_the_process() {
        let files = |of: &[(&str, &str)]| {
            let root = std::env::temp_dir().join(format!("hmem-cgroup-{}", std::process::id()));
            for (path, text) in of {
                let path = root.join(path);
                fs::create_dir_all(path.parent().expect("a folder")).expect("create");
                fs::write(path, text).expect("write");
            }
            let facts = Facts { root: Some(root.clone()), ..Facts::default() };
            let limit = rdma_limit(&facts);
            let _ = fs::remove_dir_all(root);
            limit
        };
        let of_a = "group /a: mlx5_0 has 20 of 20 objects";
        let own = ("proc/self/cgroup", "0::/a/b\n");
        let mounted = ("sys/fs/cgroup/cgroup.controllers", "rdma");
        let limit = ("sys/fs/cgroup/a/rdma.max", "mlx5_0 hca_handle=max hca_object=20\n");
        let used = |text| ("sys/fs/cgroup/a/rdma.current", text);
        let (reached, not_reached) = (RdmaLimit::Reached, RdmaLimit::NotReached);
        assert_eq!(files(&[]), RdmaLimit::Unknown);
        assert_eq!(files(&[own]), RdmaLimit::Unknown, "no mounted groups");
        assert_eq!(files(&[own, mounted]), not_reached, "no limit");
        let full = used("mlx5_1 hca_handle=1 hca_object=3\nmlx5_0 hca_handle=1 hca_object=20\n");
        assert_eq!(files(&[own, mounted, limit, full]), reached(of_a.into()));
        let free = used("mlx5_0 hca_handle=1 hca_object=19\n");
        assert_eq!(files(&[own, mounted, limit, free]), not_reached);
        // In a container, groups above the root are hidden.
        let hidden = ("sys/fs/cgroup/cgroup.type", "domain\n");
        assert_eq!(files(&[own, mounted, limit, free, hidden]), RdmaLimit::Unknown);
        assert_eq!(files(&[own, mounted, limit, full, hidden]), reached(of_a.into()));
        // Version 1 beside version 2.
        let both = ("proc/self/cgroup", "9:rdma:/c\n0::/\n");
        let v1 = [
            ("sys/fs/cgroup/rdma/cgroup.procs", ""),
            ("sys/fs/cgroup/rdma/c/rdma.max", "mlx5_0 hca_object=4"),
            ("sys/fs/cgroup/rdma/c/rdma.current", "mlx5_0 hca_object=4"),
        ];
        let of_c = "group /c: mlx5_0 has 4 of 4 objects";
        assert_eq!(files(&[both, mounted, v1[0], v1[1], v1[2]]), reached(of_c.into()));
    }
}
