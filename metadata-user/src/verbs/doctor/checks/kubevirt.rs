//! KubeVirt's feed: the node's name, access to the API server, kubelet's directory, control groups.

use super::super::facts::Found;
use super::super::{Check, Directory, Facts, Status};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let Some(kubevirt) = &facts.kubevirt else { return Vec::new() };
    let mut checks = vec![match &kubevirt.node {
        Ok(node) => Check::ok("kubevirt.node", format!("the VMs of node {node} are served")),
        Err(reason) => Check::fail(
            "kubevirt.node",
            reason.clone(),
            "the node's name in the cluster",
            "Set the variable NODE_NAME from `spec.nodeName`, as the manifests do, or set `kubevirt: {node: NAME}`",
        ),
    }];
    checks.push(match &kubevirt.api {
        None => Check::ok("kubevirt.api", "the API server is not watched; the node hook reports VMs"),
        Some(Ok(())) => Check::ok("kubevirt.api", "address, certificate and credentials exist"),
        Some(Err(reason)) => Check::fail(
            "kubevirt.api",
            reason.clone(),
            "an address, the authority's certificate, and a token or a client certificate",
            "Run the agent in a pod with a service account's token (`automountServiceAccountToken`), or name a file by \
             `kubevirt: {kubeconfig: FILE}`",
        ),
    });
    checks.push(place(
        Check::ok("kubevirt.kubelet", ""),
        Status::Fail,
        &kubevirt.pods,
        "kubelet's directory of pods",
        "Set `kubevirt: {kubelet: DIR}` to kubelet's root directory as the agent sees it; in a container mount the node's \
         /var/lib/kubelet/pods below it (HostToContainer)",
    ));
    // The agent finds a launcher by its socket, or by its control group if it cannot connect to the socket.
    checks.push(place(
        Check::ok("kubevirt.cgroups", ""),
        Status::Warn,
        &kubevirt.cgroups,
        "the node's control groups, to find launchers whose sockets the agent cannot connect to",
        "Set `kubevirt: {cgroups: DIR}` to the mount of the control groups as the agent sees it; in a container mount \
         the node's /sys/fs/cgroup",
    ));
    checks.extend(kubevirt.hook.as_ref().map(|directory| {
        place(
            Check::ok("kubevirt.hook", ""),
            Status::Fail,
            directory,
            "the directory of the node hook's socket",
            "Set `kubevirt: {hook: PATH}` to a socket in the directory of KubeVirt's plugins; in a container mount that \
             directory",
        )
    }));
    checks
}

/// Checks that a directory exists. `ok` has the check's name; `otherwise` is the result if it does not exist.
fn place(ok: Check, otherwise: Status, directory: &Directory, expected: &str, remedy: &str) -> Check {
    let shown = directory.path.display();
    let found = match &directory.found {
        Ok(Some(Found { directory: true, .. })) => return Check { found: shown.to_string(), ..ok },
        Ok(Some(_)) => format!("{shown} is not a directory"),
        Ok(None) => format!("{shown} does not exist"),
        Err(failure) => format!("{shown}: {failure}"),
    };
    Check { status: otherwise, ..Check::fail(ok.name, found, expected, remedy) }
}
