//! The fields of a VirtualMachineInstance that are used, and no others.
//!
//! Names are those of KubeVirt's `api/core/v1` (v1.9.0). What is unknown is passed over: a VMI of a newer KubeVirt
//! is read as far as it is understood. An absent list and `null` are the same, as Go writes them.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny};
use serde::{Deserialize, Serialize, Serializer};

use crate::room;

/// The label with the name of the node a VMI runs on, from the moment that node takes it over.
pub const NODE_LABEL: &str = "kubevirt.io/nodeName";
/// The label with the name of the node a VMI migrates to.
pub const TARGET_LABEL: &str = "kubevirt.io/migrationTargetNodeName";

/// Why something is no VMI that can be read. Field and kind only: VMIs hold passwords.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a VirtualMachineInstance as KubeVirt's v1 describes it, found another form at `{field}`")]
pub struct VmiError {
    /// The field that is in another form.
    pub field: String,
}

/// A VMI.
#[derive(Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Vmi {
    /// Its names.
    pub metadata: Meta,
    /// What was asked for.
    pub spec: Spec,
    /// What has become of it.
    pub status: Status,
}

impl fmt::Debug for Vmi {
    /// Its name: user-data has passwords in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vmi({})", self.key())
    }
}

impl Vmi {
    /// Reads the JSON of a VMI, which must have a name.
    ///
    /// # Errors
    /// [`VmiError`] with the field that is not what it should be.
    pub fn read(json: &[u8]) -> Result<Self, VmiError> {
        let mut json = serde_json::Deserializer::from_slice(json);
        let vmi: Self = serde_path_to_error::deserialize(&mut json)
            .map_err(|error| VmiError { field: error.path().to_string() })?;
        match vmi.metadata.name.is_empty() || vmi.metadata.namespace.is_empty() {
            true => Err(VmiError { field: "metadata.name".into() }),
            false => Ok(vmi),
        }
    }

    /// Reads it from a document that has been parsed.
    ///
    /// # Errors
    /// [`VmiError`] with the field that is not what it should be.
    pub fn from_value(value: serde_json::Value) -> Result<Self, VmiError> {
        serde_path_to_error::deserialize(value).map_err(|error| VmiError { field: error.path().to_string() })
    }

    /// Its length as JSON, of what is kept of it.
    #[must_use]
    pub fn octets(&self) -> usize {
        room::length(self)
    }

    /// `namespace/name`.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    /// An annotation.
    #[must_use]
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata.annotations.get(name).map(String::as_str)
    }

    /// True once it has ended for good.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }

    /// The UIDs of its pods on a node: two while it migrates from the node to the same one.
    pub fn pods_on(&self, node: &str) -> impl Iterator<Item = &str> {
        self.status.active_pods.iter().filter(move |(_, on)| *on == node).map(|(uid, _)| uid.as_str())
    }
}

/// `metadata`.
#[derive(Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Meta {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    #[serde(deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    pub annotations: BTreeMap<String, String>,
}

/// `spec`.
#[derive(Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Spec {
    pub hostname: Option<String>,
    pub architecture: Option<String>,
    pub domain: Domain,
    #[serde(deserialize_with = "or_default")]
    pub networks: Vec<Network>,
    #[serde(deserialize_with = "or_default")]
    pub volumes: Vec<Volume>,
    #[serde(deserialize_with = "or_default")]
    pub access_credentials: Vec<AccessCredential>,
    /// Since 1.9 (VEP 250).
    pub service_account_name: Option<String>,
}

/// `spec.domain`.
#[derive(Clone, PartialEq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Domain {
    #[serde(deserialize_with = "or_default")]
    pub firmware: Firmware,
    pub devices: Devices,
}

/// `spec.domain.firmware`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Firmware {
    /// The SMBIOS system UUID; the same over restarts and migrations.
    pub uuid: Option<String>,
}

/// `spec.domain.devices`.
#[derive(Clone, PartialEq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Devices {
    /// False when a VMI that names no NIC shall have none.
    pub autoattach_pod_interface: Option<bool>,
    /// NICs.
    #[serde(deserialize_with = "or_default")]
    pub interfaces: Vec<Interface>,
}

/// One of `spec.domain.devices.interfaces`.
#[derive(Clone, PartialEq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Interface {
    pub name: String,
    pub mac_address: Option<String>,
    /// `absent` once it is to be unplugged.
    pub state: Option<String>,
    masquerade: Option<Given>,
    bridge: Option<Given>,
    sriov: Option<Given>,
    passt: Option<Given>,
    passt_binding: Option<Given>,
    slirp: Option<Given>,
    macvtap: Option<Given>,
    binding: Option<Plugin>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Plugin {
    name: String,
}

/// A mapping that is there, whatever is in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Given;

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

impl Serialize for Given {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map::<(), (), _>([])
    }
}

/// How a NIC is bound to its pod's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding<'a> {
    /// NAT in the pod, behind a tap.
    Masquerade,
    /// A bridge in the pod, behind a tap.
    Bridge,
    /// A plugin's: with a tap or without, as the cluster's administrator has set it up.
    Plugin(&'a str),
    /// passt of KubeVirt's own, by its field's name: a process of the pod that has sockets and no tap.
    Passt(&'static str),
    /// One that has no tap an XDP program could be on, or that is not known.
    Tapless(&'static str),
}

impl Interface {
    /// Its binding. Exactly one is given, says KubeVirt's admission.
    #[must_use]
    pub fn binding(&self) -> Binding<'_> {
        let tapless = [(&self.sriov, "sriov"), (&self.slirp, "slirp"), (&self.macvtap, "macvtap")];
        if self.masquerade.is_some() {
            return Binding::Masquerade;
        }
        if self.bridge.is_some() {
            return Binding::Bridge;
        }
        if self.passt_binding.is_some() {
            return Binding::Passt("passtBinding");
        }
        if self.passt.is_some() {
            return Binding::Passt("passt");
        }
        match (&self.binding, tapless.into_iter().find(|(given, _)| given.is_some())) {
            (Some(plugin), _) => Binding::Plugin(&plugin.name),
            (None, Some((_, name))) => Binding::Tapless(name),
            (None, None) => Binding::Tapless("unknown"),
        }
    }

    /// What a VMI has that names no NIC: `default`, masqueraded.
    #[must_use]
    pub fn implied() -> Self {
        Self { name: "default".into(), masquerade: Some(Given), ..Self::default() }
    }
}

/// One of `spec.networks`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Network {
    pub name: String,
    pub multus: Option<Multus>,
}

/// `multus` of a network.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Multus {
    /// In the place of the pod network.
    #[serde(rename = "default", deserialize_with = "or_default")]
    pub is_default: bool,
}

impl Network {
    /// True for one in whose place there is no pod network: its pod NIC is another than the first.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        self.multus.as_ref().is_some_and(|multus| !multus.is_default)
    }
}

/// One of `spec.volumes`, as far as it matters here.
#[derive(Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Volume {
    pub name: String,
    cloud_init_no_cloud: Option<CloudInit>,
    cloud_init_config_drive: Option<CloudInit>,
    pub service_account: Option<ServiceAccount>,
}

impl Volume {
    /// What cloud-init gets from it, whichever of the two forms it has.
    #[must_use]
    pub fn cloud_init(&self) -> Option<&CloudInit> {
        self.cloud_init_no_cloud.as_ref().or(self.cloud_init_config_drive.as_ref())
    }
}

/// `serviceAccount` of a volume.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct ServiceAccount {
    pub service_account_name: String,
}

/// `cloudInitNoCloud` and `cloudInitConfigDrive` of a volume.
#[derive(Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct CloudInit {
    pub user_data: Option<String>,
    pub user_data_base64: Option<String>,
    /// `UserDataSecretRef` in Go.
    pub secret_ref: Option<LocalRef>,
    pub network_data: Option<String>,
    pub network_data_base64: Option<String>,
    pub network_data_secret_ref: Option<LocalRef>,
    /// Of VEP 100, which no release has yet.
    #[serde(deserialize_with = "or_default")]
    pub meta_data: BTreeMap<String, String>,
    /// Likewise.
    pub meta_data_secret_ref: Option<LocalRef>,
}

/// The name of an object in the VMI's namespace.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct LocalRef {
    pub name: String,
}

/// One of `spec.accessCredentials`.
#[derive(Clone, PartialEq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct AccessCredential {
    pub ssh_public_key: Option<SshPublicKey>,
}

/// `sshPublicKey` of an access credential.
#[derive(Clone, PartialEq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct SshPublicKey {
    pub source: KeySource,
    pub propagation_method: Propagation,
}

/// `source` of a public key.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct KeySource {
    pub secret: Option<SecretName>,
}

/// `secret` of a key's source.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct SecretName {
    pub secret_name: String,
}

/// `propagationMethod` of a public key.
#[derive(Clone, PartialEq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Propagation {
    no_cloud: Option<Given>,
    config_drive: Option<Given>,
}

impl Propagation {
    /// True where keys reach the guest in its metadata, and not by an agent in it.
    #[must_use]
    pub fn is_by_metadata(&self) -> bool {
        self.no_cloud.is_some() || self.config_drive.is_some()
    }
}

/// `status`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Status {
    /// `Pending`, `Scheduling`, `Scheduled`, `Running`, `Succeeded`, `Failed`, …
    pub phase: String,
    /// Nodes by the UID of the pod there.
    #[serde(deserialize_with = "or_default")]
    pub active_pods: BTreeMap<String, String>,
    /// NICs as they are.
    #[serde(deserialize_with = "or_default")]
    pub interfaces: Vec<StatusInterface>,
}

/// One of `status.interfaces`. Its `mac` is not here: it comes late, and some entries are the guest agent's word.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct StatusInterface {
    pub name: Option<String>,
    pub pod_interface_name: Option<String>,
}

/// `null` is what an absent field is.
fn or_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::{Binding, Vmi};
    use serde_json::json;

    #[test]
    fn what_is_unknown_or_null_is_passed_over() {
        let vmi = Vmi::from_value(json!({
            "apiVersion": "kubevirt.io/v9", "kind": "VirtualMachineInstance",
            "metadata": {"name": "a", "namespace": "b", "uid": "c", "labels": null, "managedFields": [{}]},
            "spec": {"domain": {"devices": {"interfaces": null, "disks": []}, "firmware": null}, "volumes": null,
                     "new": {"things": [1]}},
            "status": {"phase": "Running", "activePods": null, "interfaces": [{"mac": "x", "ipAddress": "y"}]},
        }))
        .expect("a VMI");
        assert_eq!(vmi.key(), "b/a");
        assert!(vmi.spec.volumes.is_empty() && vmi.metadata.labels.is_empty() && !vmi.is_final());
        for nobody in [&b"{}"[..], b"[]", br#"{"metadata": {"name": "a"}}"#] {
            assert_eq!(Vmi::read(nobody).map_err(|error| error.field), Err("metadata.name".into()));
        }
    }

    #[test]
    fn another_form_is_refused_by_field_and_not_repeated() {
        let text = br#"{"spec": {"volumes": [{"cloudInitNoCloud": {"userData": ["hunter2"]}}]}}"#;
        let error = Vmi::read(text).expect_err("no text").to_string();
        assert!(error.contains("spec.volumes[0].cloudInitNoCloud.userData"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn what_is_written_reads_back() {
        let text = include_bytes!("translate/fixtures/vmi.json");
        let vmi = Vmi::read(text).expect("a VMI");
        assert_eq!(vmi.spec.domain.devices.interfaces.len(), 3);
        assert_eq!(Vmi::read(&serde_json::to_vec(&vmi).expect("JSON")), Ok(vmi));
    }

    #[test]
    fn a_vmi_does_not_show_what_it_holds() {
        let text = br#"{"metadata": {"name": "a", "namespace": "b"},
            "spec": {"volumes": [{"cloudInitNoCloud": {"userData": "hunter2"}}]}}"#;
        assert_eq!(format!("{:?}", Vmi::read(text).expect("a VMI")), "Vmi(b/a)");
    }

    #[test]
    fn bindings_are_known_by_their_names() {
        let cases = [
            (json!({"masquerade": {}}), Binding::Masquerade),
            (json!({"bridge": {}}), Binding::Bridge),
            (json!({"binding": {"name": "managed"}}), Binding::Plugin("managed")),
            (json!({"sriov": {}}), Binding::Tapless("sriov")),
            (json!({"passtBinding": {}}), Binding::Passt("passtBinding")),
            (json!({"passt": {}}), Binding::Passt("passt")),
            (json!({"slirp": {}}), Binding::Tapless("slirp")),
            (json!({"macvtap": {}}), Binding::Tapless("macvtap")),
            (json!({"vhostuser": {}}), Binding::Tapless("unknown")),
        ];
        for (given, binding) in cases {
            let vmi = json!({"spec": {"domain": {"devices": {"interfaces": [given]}}}});
            let vmi = Vmi::from_value(vmi).expect("a VMI");
            assert_eq!(vmi.spec.domain.devices.interfaces[0].binding(), binding, "{given}");
        }
    }

    #[test]
    fn pods_are_those_of_the_node() {
        let vmi = json!({"status": {"activePods": {"u1": "n1", "u2": "n2", "u3": "n1"}}});
        let vmi = Vmi::from_value(vmi).expect("a VMI");
        assert_eq!(vmi.pods_on("n1").collect::<Vec<_>>(), ["u1", "u3"]);
    }
}
