//! Limits of RDMA objects of the process's control groups.

use hmem_core::cause::Facts;

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

/// A hierarchy of control groups that can limit RDMA objects.
struct Hierarchy {
    /// The folder with the groups.
    mount: &'static str,
    /// The name of a file that each group has.
    in_each_group: &'static str,
    /// The name of a file that each group has except the root of the machine, which has no limits.
    below_root: &'static str,
}

/// The hierarchy of the RDMA controller of version 1.
const VERSION_1: Hierarchy = Hierarchy {
    mount: "sys/fs/cgroup/rdma",
    in_each_group: "cgroup.procs",
    below_root: "rdma.max",
};
const VERSION_2: Hierarchy = Hierarchy {
    mount: "sys/fs/cgroup",
    in_each_group: "cgroup.controllers",
    below_root: "cgroup.type",
};

/// Reads the limits of RDMA objects of all control groups of the process.
pub(super) fn rdma_limit(facts: &Facts) -> RdmaLimit {
    let own = facts.text("proc/self/cgroup").unwrap_or_default();
    // A line has the number of a hierarchy, the controllers of version 1, and the group.
    let group_with = |has: fn(&str) -> bool| {
        own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            has(fields.next()?).then_some(fields.next()?)
        })
    };
    // A controller belongs to one hierarchy.
    let version_1 = group_with(|controllers| controllers.split(',').any(|name| name == "rdma"));
    let version_2 = || group_with(str::is_empty).map(|group| (group, VERSION_2));
    let found = version_1.map(|group| (group, VERSION_1)).or_else(version_2);
    let Some((group, Hierarchy { mount, in_each_group, below_root })) = found else {
        return RdmaLimit::Unknown;
    };
    let root_has = |file| facts.text(&format!("{mount}/{file}")).is_some();
    if !root_has(in_each_group) {
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
    // A container does not see the groups above its own, which is its root.
    if root_has(below_root) { RdmaLimit::Unknown } else { RdmaLimit::NotReached }
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
        let unified = ("sys/fs/cgroup/unified/cgroup.controllers", "");
        assert_eq!(files(&[both, unified, v1[0], v1[1]]), not_reached);
        let in_container = ("sys/fs/cgroup/rdma/rdma.max", "");
        assert_eq!(files(&[both, v1[0], v1[1], in_container]), RdmaLimit::Unknown);
        let of_c = "group /c: mlx5_0 has 4 of 4 objects";
        assert_eq!(files(&[both, unified, v1[0], v1[1], v1[2]]), reached(of_c.into()));
    }
}
