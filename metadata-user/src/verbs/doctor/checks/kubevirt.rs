//! Checks the needs of KubeVirt's feed: the node's name, access to the API server, kubelet's directory of pods, the
//! control groups and the directory of the node hook's socket.

use super::super::facts::PathFacts;
use super::super::{Check, CheckStatus, Directory, Facts};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let Some(kubevirt) = &facts.kubevirt else { return Vec::new() };
    let mut checks = vec![match &kubevirt.node {
        Ok(node) => Check::ok("kubevirt.node", format!("the agent serves the VMs of node {node}")),
        Err(reason) => Check::fail(
            "kubevirt.node",
            reason.clone(),
            "the node's name in the cluster",
            "Set the environment variable NODE_NAME from `spec.nodeName`, or set `kubevirt: {node: NAME}`",
        ),
    }];
    checks.push(match &kubevirt.api {
        None => Check::ok(
            "kubevirt.api",
            "the agent does not watch the API server; KubeVirt's node hook reports VMs",
        ),
        Some(Ok(())) => Check::ok(
            "kubevirt.api",
            "the address, certificate and credentials for the API server are configured",
        ),
        Some(Err(reason)) => Check::fail(
            "kubevirt.api",
            reason.clone(),
            "the API server's address, the certificate of its authority, and a token or a client certificate",
            "Run the agent in a pod with a service account's token (`automountServiceAccountToken`), or name a \
             kubeconfig file with `kubevirt: {kubeconfig: FILE}`",
        ),
    });
    checks.push(place(
        Check::ok("kubevirt.kubelet", ""),
        CheckStatus::Fail,
        &kubevirt.pods,
        "kubelet's directory of pods",
        "Set `kubevirt: {kubelet: DIR}` to kubelet's root directory as the agent sees it. In a container, mount the \
         node's /var/lib/kubelet/pods at DIR/pods (mountPropagation: HostToContainer)",
    ));
    // A launcher is the KubeVirt process that runs a VM. The agent finds the launcher by its socket. If the agent
    // cannot connect to that socket, it finds the launcher by its control group.
    checks.push(place(
        Check::ok("kubevirt.cgroups", ""),
        CheckStatus::Warn,
        &kubevirt.cgroups,
        "the node's control groups; the agent needs them if it cannot connect to the socket of a virt-launcher",
        "Set `kubevirt: {cgroups: DIR}` to the mount point of the control groups as the agent sees it. In a container, \
         mount the node's /sys/fs/cgroup",
    ));
    checks.extend(kubevirt.hook.as_ref().map(|directory| {
        place(
            Check::ok("kubevirt.hook", ""),
            CheckStatus::Fail,
            directory,
            "the directory of the node hook's socket",
            "Set `kubevirt: {hook: PATH}` to a socket in the directory of KubeVirt's plugins. In a container, mount \
             that directory",
        )
    }));
    checks
}

/// Checks that a directory exists. `ok` supplies the check's name. `otherwise` is the status if the directory does not
/// exist.
fn place(ok: Check, otherwise: CheckStatus, directory: &Directory, expected: &str, remedy: &str) -> Check {
    let shown = directory.path.display();
    let found = match &directory.found {
        Ok(Some(PathFacts { directory: true, .. })) => return Check { found: shown.to_string(), ..ok },
        Ok(Some(_)) => format!("{shown} is not a directory"),
        Ok(None) => format!("{shown} does not exist"),
        Err(failure) => format!("{shown}: {failure}"),
    };
    Check { status: otherwise, ..Check::fail(ok.name, found, expected, remedy) }
}
