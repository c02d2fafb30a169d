//! `kubevirt` of the configuration.

use std::path::PathBuf;

use serde::Deserialize;

use metadata_content::record::Serve;

/// The variable that names the node, as a DaemonSet sets it from `spec.nodeName`.
pub const NODE_VARIABLE: &str = "NODE_NAME";

/// Where kubelet keeps the pods' volumes unless the configuration says otherwise.
pub const DEFAULT_KUBELET: &str = "/var/lib/kubelet";

/// How VMs of KubeVirt are found and served; `kubevirt: {}` serves every one of the node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// The node's name; by default what [`NODE_VARIABLE`] says.
    pub node: Option<String>,
    /// kubelet's directory, which has the pods' volumes below it.
    pub kubelet: PathBuf,
    /// Where the node's control groups are mounted.
    pub cgroups: PathBuf,
    /// Serve only VMs with the annotation `imds.kubevirt.io/enabled: "true"`. Those with `"false"` never are.
    pub opt_in: bool,
    /// Namespaces whose VMs are served; none (default) means all.
    pub namespaces: Vec<String>,
    /// What a VM's instance id is. A change makes cloud-init run as for a new instance.
    pub instance_id: InstanceId,
    /// What is done for NICs that passt stands for.
    pub passt: Passt,
    /// Binding plugins that are passt in a sidecar, by the names the cluster's administrator gave them.
    pub passt_plugins: Vec<String>,
    /// Files with the token of a VM's service account, as `volume/file` of its pod; the first that is there counts.
    pub tokens: Vec<String>,
    /// Vendor-data of VMs that have none of their own.
    pub vendor_data: Option<String>,
    /// Region of all VMs.
    pub region: String,
    /// Zone of all VMs, best `<region>-<x>`.
    pub zone: String,
    /// How all VMs are served, as in a record.
    pub serve: Serve,
    /// A file with the way to the API server, with a token or a certificate; by default the cluster's the agent runs in.
    pub kubeconfig: Option<PathBuf>,
    /// Watch the cluster's API; without it VMs come by the hook alone.
    pub watch: bool,
    /// Tell in Events on the VMI whether it is served.
    pub events: bool,
    /// The socket of KubeVirt's node hook, where virt-handler can reach it
    /// (`/var/run/kubevirt/plugins/xdp-imds.sock`); none by default.
    pub hook: Option<PathBuf>,
}

impl Default for Options {
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
            serve: Serve::default(),
            kubeconfig: None,
            watch: true,
            events: true,
            hook: None,
        }
    }
}

impl Options {
    /// kubelet's directory of pods.
    #[must_use]
    pub fn pods(&self) -> PathBuf {
        self.kubelet.join("pods")
    }
}

/// `instance_id`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InstanceId {
    /// The firmware's UUID: the same over restarts and migrations, another for a clone.
    #[default]
    Uuid,
    /// `<namespace>-<name>`, as kubevirt-imds has it.
    NamespaceName,
}

/// `passt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Passt {
    /// They are reported, and not served.
    #[default]
    Report,
    /// What is sent from the pod to a metadata address is served. The pod is the identity: its other containers get the
    /// VM's metadata, too.
    Listen,
}

#[cfg(test)]
mod tests {
    use super::{InstanceId, Options, Passt};
    use std::path::Path;

    #[test]
    fn what_is_not_said_has_a_default_and_what_is_unknown_is_refused() {
        let options: Options = serde_yaml::from_str("{}").expect("all defaults");
        assert_eq!(options, Options::default());
        let text = "{node: n1, kubelet: /kubelet, opt_in: true, instance_id: namespace-name, \
                    serve: {dialects: [nocloud]}, tokens: [a/b], hook: /s, passt: listen}";
        let options: Options = serde_yaml::from_str(text).expect("options");
        assert_eq!((options.node.as_deref(), options.kubelet.as_path()), (Some("n1"), Path::new("/kubelet")));
        assert_eq!((options.opt_in, options.instance_id), (true, InstanceId::NamespaceName));
        assert_eq!((options.passt, Options::default().passt), (Passt::Listen, Passt::Report));
        for text in ["{nod: n1}", "{instance_id: name}", "{passt: yes}", "{serve: {dialects: [x]}}"] {
            serde_yaml::from_str::<Options>(text).expect_err(text);
        }
    }
}
