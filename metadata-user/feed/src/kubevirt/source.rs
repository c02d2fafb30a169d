//! KubeVirt as a source of the agent: how it is run, what status says of it, and what it needs on the node.

use metadata_content::source::RecordSource;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::{KubevirtOptions, access, contact, node, serve};
use crate::check::{Check, CheckStatus};
use crate::contact::Contact;
use crate::pods::Inlets;
use crate::publisher::Publisher;
use crate::record_part::open_mode;
use crate::source::{FailureStreak, Source, SourceContext, SourceHealth, SourceTask};

/// The VMs of KubeVirt on this node.
pub struct KubevirtSource {
    options: KubevirtOptions,
    contact: Arc<Contact>,
}

impl KubevirtSource {
    /// The source with its section of the configuration.
    #[must_use]
    pub fn new(options: KubevirtOptions) -> Self {
        Self { options, contact: contact() }
    }
}

impl Source for KubevirtSource {
    fn kind(&self) -> RecordSource {
        RecordSource::Kubevirt
    }

    fn run(&self, context: SourceContext, publisher: Publisher) -> SourceTask {
        let (options, contact) = (self.options.clone(), Arc::clone(&self.contact));
        let SourceContext { limits, addresses, state, saves, stays, pause, services, mailboxes, .. } =
            context;
        let inlets = Inlets { addresses, stay: stays, pause };
        Box::pin(async move {
            let state = (state.as_deref(), saves, mailboxes);
            serve((options, inlets), limits, state, (contact, services), publisher).await
        })
    }

    fn health(&self) -> Option<SourceHealth> {
        // Without a watch nothing is asked of the API server.
        self.options.watch.then(|| {
            let health = self.contact.report(Instant::now());
            let problem = |FailureStreak { since, kind, reason }: &FailureStreak| {
                format!("requests to the API server have failed for {since:.0} s: {kind}: {reason}")
            };
            SourceHealth { problems: health.failing.iter().map(problem).collect(), ..health }
        })
    }

    fn preflight(&self) -> Vec<Check> {
        let options = &self.options;
        let needs = Needs {
            node: node(options).map_err(|error| error.to_string()),
            api: options.watch.then(|| access(options).map_err(|error| error.to_string())),
        };
        let mut checks = needs.checks();
        checks.push(Check::directory(
            "kubevirt.kubelet",
            &options.pods(),
            CheckStatus::Fail,
            "kubelet's directory of pods",
            "Set `kubevirt: {kubelet: DIR}` to kubelet's root directory as the agent sees it. In a container, mount the \
             node's /var/lib/kubelet/pods at DIR/pods (mountPropagation: HostToContainer)",
        ));
        // A launcher is the KubeVirt process that runs a VM. The agent finds the launcher by its socket. If the agent
        // cannot connect to that socket, it finds the launcher by its control group.
        checks.push(Check::directory(
            "kubevirt.cgroups",
            &options.cgroups,
            CheckStatus::Warn,
            "the node's control groups; the agent needs them if it cannot connect to the socket of a virt-launcher",
            "Set `kubevirt: {cgroups: DIR}` to the mount point of the control groups as the agent sees it. In a container, \
             mount the node's /sys/fs/cgroup",
        ));
        checks.extend(options.hook.as_deref().and_then(Path::parent).map(|directory| {
            Check::directory(
                "kubevirt.hook",
                directory,
                CheckStatus::Fail,
                "the directory of the node hook's socket",
                "Set `kubevirt: {hook: PATH}` to a socket in the directory of KubeVirt's plugins. In a container, mount \
                 that directory",
            )
        }));
        let open = options.kubeconfig.iter().filter_map(|path| Some((path, open_mode(path)?)));
        checks.extend(open.map(|(path, mode)| {
            let path = path.display();
            Check::warn(
                "kubevirt.kubeconfig",
                format!("{path} has mode {mode:04o}: others may read or change it"),
                "mode 0640 or stricter, because it holds a token or a key",
                format!("Run `chmod 0600 {path}`"),
            )
        }));
        checks
    }

    /// Each VM has its own namespace.
    fn is_in_namespaces(&self) -> bool {
        true
    }

    fn follows_services(&self) -> bool {
        self.options.events
    }
}

/// What the source needs beside directories.
struct Needs {
    /// The node's name in the cluster, or the reason why it is unknown.
    node: Result<String, String>,
    /// Whether a client for the API server can be configured; no request is sent. `None` without a watch.
    api: Option<Result<(), String>>,
}

impl Needs {
    fn checks(self) -> Vec<Check> {
        let node = match self.node {
            Ok(node) => Check::ok("kubevirt.node", format!("the agent serves the VMs of node {node}")),
            Err(reason) => Check::fail(
                "kubevirt.node",
                reason,
                "the node's name in the cluster",
                "Set the environment variable NODE_NAME from `spec.nodeName`, or set `kubevirt: {node: NAME}`",
            ),
        };
        let api = match self.api {
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
                reason,
                "the API server's address, the certificate of its authority, and a token or a client certificate",
                "Run the agent in a pod with a service account's token (`automountServiceAccountToken`), or name a \
                 kubeconfig file with `kubevirt: {kubeconfig: FILE}`",
            ),
        };
        vec![node, api]
    }
}

#[cfg(test)]
mod tests {
    use super::{KubevirtSource, Needs};
    use crate::check::CheckStatus::{Fail, Ok as Good, Warn};
    use crate::kubevirt::KubevirtOptions;
    use crate::source::Source as _;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_missing_name_or_client_is_reported_with_its_remedy() {
        let known = || Needs { node: Ok("n1".into()), api: Some(Ok(())) };
        for (what, needs, name, words) in [
            (
                "no name of the node",
                Needs { node: Err("found none".into()), ..known() },
                "kubevirt.node",
                &["found none", "NODE_NAME", "spec.nodeName"][..],
            ),
            (
                "no access to the API server",
                Needs { api: Some(Err("no token".into())), ..known() },
                "kubevirt.api",
                &["no token", "automountServiceAccountToken", "kubeconfig"],
            ),
        ] {
            let checks = needs.checks();
            let wrong: Vec<_> = checks.iter().filter(|check| check.status != Good).collect();
            let [check] = wrong[..] else { panic!("{what}: {checks:?}") };
            assert_eq!((check.name, check.status), (name, Fail), "{what}");
            let said = format!("{} {}", check.found, check.remedy.clone().unwrap_or_default());
            assert!(words.iter().all(|word| said.contains(word)), "{what}: {said}");
        }
        let without_watch = Needs { api: None, ..known() };
        assert!(
            [known(), without_watch].into_iter().flat_map(Needs::checks).all(|check| check.status == Good)
        );
    }

    #[test]
    fn the_directories_that_the_source_needs_are_checked() {
        let room = tempfile::tempdir().expect("a directory");
        for below in ["kubelet/pods", "cgroup", "plugins"] {
            fs::create_dir_all(room.path().join(below)).expect("a directory");
        }
        let there = KubevirtOptions {
            node: Some("n1".into()),
            watch: false,
            kubelet: room.path().join("kubelet"),
            cgroups: room.path().join("cgroup"),
            hook: Some(room.path().join("plugins/xdp-imds.sock")),
            ..KubevirtOptions::default()
        };
        let kubeconfig = room.path().join("kubeconfig");
        fs::write(&kubeconfig, "").expect("written");
        fs::set_permissions(&kubeconfig, fs::Permissions::from_mode(0o644)).expect("a mode");
        let away = |name: &str| room.path().join("away").join(name);
        for (what, options, wrong) in [
            ("all are there", there.clone(), vec![]),
            ("the hook is off", KubevirtOptions { hook: None, ..there.clone() }, vec![]),
            (
                "no directory of pods",
                KubevirtOptions { kubelet: away("kubelet"), ..there.clone() },
                vec![("kubevirt.kubelet", Fail)],
            ),
            (
                "no control groups",
                KubevirtOptions { cgroups: away("cgroup"), ..there.clone() },
                vec![("kubevirt.cgroups", Warn)],
            ),
            (
                "no directory for the hook's socket",
                KubevirtOptions { hook: Some(away("xdp-imds.sock")), ..there.clone() },
                vec![("kubevirt.hook", Fail)],
            ),
            (
                "a kubeconfig that everybody may read",
                KubevirtOptions { kubeconfig: Some(kubeconfig), ..there },
                vec![("kubevirt.kubeconfig", Warn)],
            ),
        ] {
            let checks = KubevirtSource::new(options).preflight();
            let found: Vec<_> = checks
                .iter()
                .filter(|check| check.status != Good)
                .map(|check| (check.name, check.status))
                .collect();
            assert_eq!(found, wrong, "{what}");
        }
    }
}
