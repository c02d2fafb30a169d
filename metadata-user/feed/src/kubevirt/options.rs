//! The section `kubevirt` of the configuration.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{Patch, PatchParams};
use metadata_content::record::ServeSettings;
use metadata_content::record::values::Account;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::PathBuf;
use tokio::runtime::Builder;

use super::client;
use crate::FeedError;

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
    /// that is derived from its name and identifies nobody: whoever may choose namespaces finds two with one number.
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
        }
    }
}

impl KubevirtOptions {
    /// kubelet's directory of pods, below its root directory.
    #[must_use]
    pub fn pods(&self) -> PathBuf {
        self.kubelet.join("pods")
    }

    /// The number of a namespace, for clouds whose projects and accounts have numbers: the configured one, or else one
    /// derived from its name that no other namespace is configured with.
    pub(super) fn account_of(&self, namespace: &str) -> u64 {
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
pub(super) const INSTANCE_TYPES: [&str; 2] =
    ["kubevirt.io/cluster-instancetype-name", "kubevirt.io/instancetype-name"];

/// The volume that mounts an annotated Secret or ConfigMap in the pod. `xdp-imds webhook` or the admission policy adds
/// it.
#[must_use]
pub fn volume(field: &str) -> String {
    format!("imds-{field}")
}

// Writes a ConfigMap of the cluster.

/// The name under which the API server keeps who wrote a field.
const MANAGER: &str = "xdp-imds-identity";

/// Replaces these keys of a ConfigMap, as a program in a pod of the cluster or by `kubeconfig`. Others stay as they
/// are.
///
/// # Errors
/// The API server cannot be reached or refuses; the error says what the role lacks.
pub fn replace(
    kubeconfig: Option<PathBuf>,
    namespace: &str,
    name: &str,
    data: &BTreeMap<&str, String>,
) -> Result<(), FeedError> {
    let options = KubevirtOptions { kubeconfig, ..KubevirtOptions::default() };
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data});
    let refused = |error: &kube::Error| FeedError::Vm {
        reason: format!(
            "ConfigMap {namespace}/{name}: {}; expected a ConfigMap of this name, and a role that may `patch` it",
            client::failure(error).reason
        ),
    };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| FeedError::Vm { reason: error.to_string() })?;
    runtime.block_on(async {
        let maps: Api<ConfigMap> = Api::namespaced(client::open(&options).await?, namespace);
        let parameters = PatchParams::apply(MANAGER).force();
        maps.patch(name, &parameters, &Patch::Apply(object)).await.map(drop).map_err(|error| refused(&error))
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{InstanceId, KubevirtOptions, Passt};

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
                    serve: {dialects: [nocloud]}, tokens: [a/b], hook: /s, passt: listen}";
        let options: KubevirtOptions = serde_yaml::from_str(text).expect("options");
        assert_eq!((options.node.as_deref(), options.kubelet.as_path()), (Some("n1"), Path::new("/kubelet")));
        assert_eq!((options.opt_in, options.instance_id), (true, InstanceId::NamespaceName));
        assert_eq!((options.passt, KubevirtOptions::default().passt), (Passt::Listen, Passt::Report));
        for text in ["{nod: n1}", "{instance_id: name}", "{passt: yes}", "{serve: {dialects: [x]}}"] {
            serde_yaml::from_str::<KubevirtOptions>(text).expect_err(text);
        }
    }
}
