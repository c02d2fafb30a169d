//! The feed of KubeVirt: the node's name, the way to the API server, kubelet's directory, control groups.

use super::super::facts::Found;
use super::super::{Check, Directory, Facts, Status};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let Some(kubevirt) = &facts.kubevirt else { return Vec::new() };
    let mut checks = vec![match &kubevirt.node {
        Ok(node) => Check::ok("kubevirt.node", format!("the VMs of node {node} are served")),
        Err(reason) => Check::fail(
            "kubevirt.node",
            reason.clone(),
            "the node's name as the cluster has it",
            "Set the variable NODE_NAME from `spec.nodeName`, as the manifests do, or `kubevirt: {node: NAME}`",
        ),
    }];
    checks.push(match &kubevirt.api {
        None => Check::ok("kubevirt.api", "the API server is not watched: VMs come by the node hook"),
        Some(Ok(())) => Check::ok("kubevirt.api", "the address, the certificate and the credentials are there"),
        Some(Err(reason)) => Check::fail(
            "kubevirt.api",
            reason.clone(),
            "an address, a certificate of the authority, and a token or a certificate",
            "Run it in a pod with a service account's token (`automountServiceAccountToken`), or name a file by \
             `kubevirt: {kubeconfig: FILE}`",
        ),
    });
    checks.push(place(
        Check::ok("kubevirt.kubelet", ""),
        Status::Fail,
        &kubevirt.pods,
        "kubelet's directory of pods",
        "Name kubelet's root directory as the agent sees it by `kubevirt: {kubelet: DIR}`; in a container mount the \
         node's /var/lib/kubelet/pods below it (HostToContainer)",
    ));
    // Launchers whose sockets the agent may connect to are found without them.
    checks.push(place(
        Check::ok("kubevirt.cgroups", ""),
        Status::Warn,
        &kubevirt.cgroups,
        "the node's control groups: launchers whose sockets cannot be connected to are found there",
        "Name the mount of the control groups as the agent sees it by `kubevirt: {cgroups: DIR}`; in a container \
         mount the node's /sys/fs/cgroup",
    ));
    checks.extend(kubevirt.hook.as_ref().map(|directory| {
        place(
            Check::ok("kubevirt.hook", ""),
            Status::Fail,
            directory,
            "the directory of the node hook's socket",
            "Name a socket in the directory of KubeVirt's plugins by `kubevirt: {hook: PATH}`; in a container mount that \
             directory",
        )
    }));
    checks
}

/// Whether a directory is there; `ok` has the check's name, `otherwise` is what it comes to if it is not.
fn place(ok: Check, otherwise: Status, directory: &Directory, expected: &str, remedy: &str) -> Check {
    let shown = directory.path.display();
    let found = match &directory.found {
        Ok(Some(Found { directory: true, .. })) => return Check { found: shown.to_string(), ..ok },
        Ok(Some(_)) => format!("{shown} is no directory"),
        Ok(None) => format!("{shown} is not there"),
        Err(failure) => format!("{shown}: {failure}"),
    };
    Check { status: otherwise, ..Check::fail(ok.name, found, expected, remedy) }
}
