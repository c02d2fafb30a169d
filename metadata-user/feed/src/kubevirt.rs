//! The feed of KubeVirt: one record for each VM on this node.
//!
//! ```text
//!  API server ── VMIs running or arriving here ───────┐
//!  virt-handler ── node hook: a VMI is about to run ──┼─▶ core ─▶ Upsert, Expect, Remove
//!  feed::pods ── namespace, taps, volumes, the end ───┘    │
//!                                                          └─▶ Events on the VMI
//! ```
//!
//! A VMI gives the VM's configuration and lists its pods. The pod gives the taps and the content of Secrets.
//! [`translate`] makes a record of both. The feed removes nothing because the API server is unreachable.

mod client;
pub mod core;
pub mod hook;
mod kept;
mod run;
pub mod translate;
pub mod vmi;
pub mod volumes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_content::record::ServeSettings;
use metadata_content::record::values::Account;
use metadata_content::source::RecordSource;
use serde::{Deserialize, Deserializer, Serialize, de};
use sha2::{Digest as _, Sha256};

use crate::check::{Check, CheckStatus};
use crate::contact::Contact;
use crate::pods::Inlets;
use crate::publisher::Publisher;
use crate::record_part::open_mode;
use crate::source::{FailureStreak, Source, SourceContext, SourceHealth, SourceTask};
pub use client::{access, replace_config_map};
pub use kept::FILE as KEPT;
pub use run::{Feed, LIST_TIMEOUT, Launchers, SPREAD, WatchPacing, contact, follow, node, serve};
pub use vmi::{Vmi, VmiError};
pub use volumes::VolumeCache;

// The section `kubevirt` of the configuration.

/// The environment variable with the node's name; a DaemonSet sets it from `spec.nodeName`.
pub const NODE_VARIABLE: &str = "NODE_NAME";

/// Default directory of kubelet, which holds the pods' volumes.
pub const DEFAULT_KUBELET: &str = "/var/lib/kubelet";

/// How the agent finds and serves KubeVirt's VMs; `kubevirt: {}` serves every VM on the node.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct KubevirtOptions {
    /// The node's name; by default the environment variable `NODE_NAME`.
    pub node: Option<String>,
    /// kubelet's root directory, which holds the pods' volumes.
    pub kubelet: PathBuf,
    /// The mount point of the node's control groups.
    pub cgroups: PathBuf,
    /// Serve only VMs with the annotation `imds.kubevirt.io/enabled: "true"`. The value `"false"` always excludes a VM.
    pub opt_in: bool,
    /// Namespaces of the VMs to serve; an empty list (the default) means all.
    pub namespaces: Vec<String>,
    /// The source of a VM's instance id. After a change cloud-init treats the VM as a new instance.
    pub instance_id: InstanceId,
    /// What to do with NICs on passt.
    pub passt: Passt,
    /// The cluster's names of binding plugins that run passt in a sidecar.
    pub passt_plugins: Vec<String>,
    /// Files with the token of a VM's service account, as `volume/file` of its pod. The first one that exists counts.
    pub tokens: Vec<String>,
    /// Vendor-data for VMs without their own.
    pub vendor_data: Option<String>,
    /// The region of all VMs.
    pub region: String,
    /// The zone of all VMs, preferably `<region>-<x>`.
    pub zone: String,
    /// The project and account number of each namespace, 12 digits in quotes. A namespace without one gets a number
    /// that is derived from its name and identifies nobody: anyone who may choose namespaces finds two with one number.
    pub accounts: BTreeMap<String, Account>,
    /// The `serve` section of every VM's record.
    pub serve: ServeSettings,
    /// A kubeconfig file with a token or a certificate; by default the agent uses the cluster it runs in.
    pub kubeconfig: Option<PathBuf>,
    /// Watch the cluster's API. Without it only the hook names VMs.
    pub watch: bool,
    /// Report in Events on the VMI how it is served.
    pub events: bool,
    /// The socket of KubeVirt's node hook in a directory that virt-handler reaches
    /// (`/var/run/kubevirt/plugins/xdp-imds.sock`); none by default.
    pub hook: Option<PathBuf>,
    /// Seconds that a live migration waits in the node hook for the guest to acknowledge its event, at most 30; 0
    /// (default) for no wait. Needs `watch`, and more time in the Plugin (`timeout`) than this.
    #[serde(deserialize_with = "hold_seconds")]
    pub hold_seconds: u8,
}

impl Default for KubevirtOptions {
    fn default() -> Self {
        Self {
            node: None,
            kubelet: DEFAULT_KUBELET.into(),
            cgroups: "/sys/fs/cgroup".into(),
            opt_in: false,
            namespaces: Vec::new(),
            instance_id: InstanceId::default(),
            passt: Passt::default(),
            passt_plugins: vec!["passt".into()],
            tokens: vec!["imds-token/token".into()],
            vendor_data: None,
            region: "local".into(),
            zone: "local-a".into(),
            accounts: BTreeMap::new(),
            serve: ServeSettings::default(),
            kubeconfig: None,
            watch: true,
            events: true,
            hook: None,
            hold_seconds: 0,
        }
    }
}

impl KubevirtOptions {
    /// kubelet's directory of pods, below its root directory.
    #[must_use]
    pub fn pods(&self) -> PathBuf {
        self.kubelet.join("pods")
    }

    /// How long a live migration waits for its guest. Without a watch nobody announces one.
    fn hold(&self) -> Duration {
        if self.watch { Duration::from_secs(u64::from(self.hold_seconds)) } else { Duration::ZERO }
    }

    /// The number of a namespace, for clouds whose projects and accounts have numbers: the configured one, or else one
    /// derived from its name that no other namespace is configured with.
    fn account_of(&self, namespace: &str) -> u64 {
        if let Some(number) = self.accounts.get(namespace).map(number) {
            return number;
        }
        let tries = (0..=self.accounts.len()).map(|at| match at {
            0 => derived(namespace),
            _ => derived(&format!("{namespace}/{at}")),
        });
        // Each configured number stands in the way of one try.
        let is_free = |number: &u64| !self.accounts.values().any(|taken| self::number(taken) == *number);
        tries.fold(None, |found, number| found.or(Some(number).filter(is_free))).unwrap_or_default()
    }
}

/// The digits of a configured account.
fn number(account: &Account) -> u64 {
    account.as_str().parse().unwrap_or_default()
}

/// A number of twelve digits derived from a text.
fn derived(text: &str) -> u64 {
    let hash: [u8; 32] = Sha256::digest(text).into();
    hash.iter().take(8).fold(0_u64, |number, byte| number << 8 | u64::from(*byte)) % 1_000_000_000_000
}

/// Longest wait of a live migration for its guest, in seconds.
const HOLD_SECONDS_MOST: u8 = 30;

fn hold_seconds<'de, D: Deserializer<'de>>(from: D) -> Result<u8, D::Error> {
    let seconds = i64::deserialize(from)?;
    u8::try_from(seconds).ok().filter(|seconds| *seconds <= HOLD_SECONDS_MOST).ok_or_else(|| {
        de::Error::custom(format!("expected at most {HOLD_SECONDS_MOST} in `hold_seconds`, found {seconds}"))
    })
}

/// `instance_id`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum InstanceId {
    /// The firmware's UUID: it survives restarts and migrations, and a clone has another.
    #[default]
    Uuid,
    /// `<namespace>-<name>`, as in kubevirt-imds; `<namespace>/<name>` for a namespace with a hyphen, because two VMs
    /// could have the same id otherwise.
    NamespaceName,
}

/// `passt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Passt {
    /// Do not serve these NICs; report them.
    #[default]
    Report,
    /// Serve requests from the pod to a metadata address. The pod is the identity, so its other containers get the VM's
    /// metadata too.
    Listen,
}

// The annotations of kubevirt-imds, including those its documentation announces for later.

/// `"true"` or `"false"`: whether the feed serves the VM.
pub const ENABLED: &str = "imds.kubevirt.io/enabled";
/// User-data as text.
pub const USER_DATA: &str = "imds.kubevirt.io/user-data";
/// The name of a ConfigMap that holds user-data.
pub const USER_DATA_CONFIGMAP: &str = "imds.kubevirt.io/user-data-configmap";
/// The name of a Secret that holds user-data.
pub const USER_DATA_SECRET: &str = "imds.kubevirt.io/user-data-secret";
/// Vendor-data as text.
pub const VENDOR_DATA: &str = "imds.kubevirt.io/vendor-data";
/// The name of a ConfigMap that holds vendor-data.
pub const VENDOR_DATA_CONFIGMAP: &str = "imds.kubevirt.io/vendor-data-configmap";
/// The name of a Secret that holds vendor-data.
pub const VENDOR_DATA_SECRET: &str = "imds.kubevirt.io/vendor-data-secret";

/// The instance type the VM was made from: of the cluster, then of its namespace.
const INSTANCE_TYPES: [&str; 2] = ["kubevirt.io/cluster-instancetype-name", "kubevirt.io/instancetype-name"];

/// The volume that mounts an annotated Secret or ConfigMap in the pod. `xdp-imds webhook` or the admission policy adds
/// it.
#[must_use]
pub fn volume(field: &str) -> String {
    format!("imds-{field}")
}

// KubeVirt as a source of the agent: how it is run, what status says of it, and what it needs on the node.

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
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;
    use std::time::Duration;

    use super::{InstanceId, KubevirtOptions, KubevirtSource, Needs, Passt};
    use crate::check::CheckStatus::{Fail, Ok as Good, Warn};
    use crate::source::Source as _;

    #[test]
    fn a_namespace_has_its_configured_number_and_no_derived_number_is_a_configured_one() {
        let mut options = KubevirtOptions::default();
        let derived = options.account_of("shop");
        assert!(derived < 1_000_000_000_000);
        assert_ne!(derived, options.account_of("bank"));
        // An attacker has found a namespace whose derived number is that of another tenant.
        let text = format!("{{accounts: {{bank: '{derived:012}'}}}}");
        options = serde_yaml::from_str(&text).expect("options");
        assert_eq!(options.account_of("bank"), derived);
        assert_ne!(options.account_of("shop"), derived);
        for text in ["{accounts: {a: 1}}", "{accounts: {a: '1'}}", "{accounts: {a: 'x00000000000'}}"] {
            serde_yaml::from_str::<KubevirtOptions>(text).expect_err(text);
        }
    }

    #[test]
    fn absent_options_have_defaults_and_unknown_ones_are_refused() {
        let options: KubevirtOptions = serde_yaml::from_str("{}").expect("all defaults");
        assert_eq!(options, KubevirtOptions::default());
        let text = "{node: n1, kubelet: /kubelet, opt_in: true, instance_id: namespace-name, \
                serve: {dialects: [nocloud]}, tokens: [a/b], hook: /s, passt: listen, hold_seconds: 30}";
        let options: KubevirtOptions = serde_yaml::from_str(text).expect("options");
        assert_eq!((options.node.as_deref(), options.kubelet.as_path()), (Some("n1"), Path::new("/kubelet")));
        assert_eq!((options.opt_in, options.instance_id), (true, InstanceId::NamespaceName));
        assert_eq!((options.passt, KubevirtOptions::default().passt), (Passt::Listen, Passt::Report));
        assert_eq!(options.hold(), Duration::from_secs(30));
        let unwatched = KubevirtOptions { watch: false, ..options };
        assert_eq!((unwatched.hold(), KubevirtOptions::default().hold()), (Duration::ZERO, Duration::ZERO));
        for text in [
            "{hold_seconds: 31}",
            "{hold_seconds: 256}",
            "{nod: n1}",
            "{instance_id: name}",
            "{passt: yes}",
            "{serve: {dialects: [x]}}",
        ] {
            serde_yaml::from_str::<KubevirtOptions>(text).expect_err(text);
        }
    }

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
