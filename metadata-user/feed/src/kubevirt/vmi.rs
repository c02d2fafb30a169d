//! The fields of a VirtualMachineInstance that the feed uses.
//!
//! Names are those of KubeVirt's `api/core/v1` (v1.9.0). The decoder ignores unknown fields, so that it reads VMIs of a
//! newer KubeVirt. An absent list and `null` are equal, because Go writes either.

use std::collections::BTreeMap;
use std::fmt;

use metadata_common::mac::Mac;
use metadata_content::parser;
use serde::de::{Deserializer, IgnoredAny};
use serde::{Deserialize, Serialize, Serializer};

use crate::memory_budget;
use metadata_content::record::Owner;

/// The label with the node a VMI runs on, set from the moment that node takes it over.
pub const NODE_LABEL: &str = "kubevirt.io/nodeName";
/// The label with the node a VMI migrates to.
pub const TARGET_LABEL: &str = "kubevirt.io/migrationTargetNodeName";

/// Why a VMI cannot be decoded. The message holds only the field's name, because VMIs contain passwords.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a VirtualMachineInstance as KubeVirt's v1 describes it, found another form at `{field}`")]
pub struct VmiError {
    /// The path of the field with an unexpected form.
    pub field: String,
}

/// A VirtualMachineInstance.
#[derive(Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Vmi {
    /// Name, namespace, UID, labels and annotations.
    pub metadata: Meta,
    /// The desired state.
    pub spec: Spec,
    /// The observed state.
    pub status: VmiStatus,
}

impl fmt::Debug for Vmi {
    /// Shows the name only, because user-data may contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vmi({})", self.key())
    }
}

impl Vmi {
    /// Decodes a VMI from JSON. It must have a name.
    ///
    /// # Errors
    /// [`VmiError`] with the field of unexpected form.
    pub fn read(json: &[u8]) -> Result<Self, VmiError> {
        let vmi: Self = parser::json(json).map_err(|error| VmiError { field: error.field })?;
        if vmi.metadata.name.is_empty() || vmi.metadata.namespace.is_empty() {
            return Err(VmiError { field: "metadata.name".into() });
        }
        Ok(vmi)
    }

    /// Decodes a VMI from a parsed document.
    ///
    /// # Errors
    /// [`VmiError`] with the field of unexpected form.
    pub fn from_value(value: serde_json::Value) -> Result<Self, VmiError> {
        serde_path_to_error::deserialize(value).map_err(|error| VmiError { field: error.path().to_string() })
    }

    /// The length of the decoded fields as JSON, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        memory_budget::length(self)
    }

    /// `namespace/name`, the key of the VMI.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    /// The owner of what the agent keeps for the VM, by what the API server assigned: namespace, name, and the UID of
    /// the VirtualMachine, which survives stop and start, or that of a VMI without one.
    ///
    /// A tenant may write an owner reference into a VMI of its own. It reaches nothing of another tenant by that,
    /// because namespace and name are the VMI's own, and no two VMIs have the same ones at a time. The cluster's
    /// garbage collector deletes an object whose owner does not exist.
    #[must_use]
    pub fn owner(&self) -> Owner {
        let Meta { namespace, name, uid, owner_references, .. } = &self.metadata;
        let is_vm = |owner: &&OwnerReference| {
            let group = owner.api_version.split_once('/').map(|(group, _)| group);
            owner.controller
                && owner.kind == "VirtualMachine"
                && group == Some("kubevirt.io")
                && owner.name == *name
                && !owner.uid.is_empty()
        };
        let vm = owner_references.iter().flatten().find(is_vm);
        Owner::kubevirt(namespace, name, vm.map_or(uid, |vm| &vm.uid))
    }

    /// The value of an annotation.
    #[must_use]
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata.annotations.get(name).map(String::as_str)
    }

    /// True once the VMI has ended for good.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }

    /// The UIDs of its pods on a node: two while it migrates within the node.
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
    /// `None` if it is unknown: an earlier release did not keep it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner_references: Option<Vec<OwnerReference>>,
    /// When the VMI is to be gone, once somebody has deleted it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_timestamp: Option<String>,
}

/// One of `metadata.ownerReferences`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct OwnerReference {
    pub api_version: String,
    pub kind: String,
    pub name: String,
    pub uid: String,
    #[serde(deserialize_with = "or_default")]
    pub controller: bool,
}

/// `spec`.
#[derive(Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Spec {
    pub hostname: Option<String>,
    pub architecture: Option<String>,
    pub domain: DomainSpec,
    #[serde(deserialize_with = "or_default")]
    pub networks: Vec<VmiNetwork>,
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
pub struct DomainSpec {
    #[serde(deserialize_with = "or_default")]
    pub firmware: VmiFirmware,
    pub devices: VmiDevices,
}

/// `spec.domain.firmware`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct VmiFirmware {
    /// The SMBIOS system UUID; it survives restarts and migrations.
    pub uuid: Option<String>,
}

/// `spec.domain.devices`.
#[derive(Clone, PartialEq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VmiDevices {
    /// False if a VMI without interfaces shall have no NIC.
    pub autoattach_pod_interface: Option<bool>,
    /// The NICs.
    #[serde(deserialize_with = "or_default")]
    pub interfaces: Vec<VmiInterface>,
}

/// One of `spec.domain.devices.interfaces`.
#[derive(Clone, PartialEq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct VmiInterface {
    pub name: String,
    pub mac_address: Option<String>,
    /// `absent` once the NIC is to be unplugged.
    pub state: Option<String>,
    masquerade: Option<Present>,
    bridge: Option<Present>,
    sriov: Option<Present>,
    passt: Option<Present>,
    passt_binding: Option<Present>,
    slirp: Option<Present>,
    macvtap: Option<Present>,
    binding: Option<Plugin>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Plugin {
    name: String,
}

/// A mapping of any content; only its presence counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Present;

impl<'de> Deserialize<'de> for Present {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

impl Serialize for Present {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map::<(), (), _>([])
    }
}

/// How a NIC is bound to its pod's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NicBinding<'a> {
    /// NAT in the pod, behind a tap.
    Masquerade,
    /// A bridge in the pod, behind a tap.
    Bridge,
    /// By a binding plugin, with or without a tap, as the cluster's administrator configured it.
    Plugin(&'a str),
    /// By KubeVirt's own passt, a process in the pod that uses sockets and no tap. The string is the field's name.
    Passt(&'static str),
    /// By a binding without a tap for an XDP program, or by an unknown one.
    Tapless(&'static str),
}

impl VmiInterface {
    /// The NIC's binding. KubeVirt's admission ensures that exactly one is set.
    #[must_use]
    pub fn binding(&self) -> NicBinding<'_> {
        let tapless = [(&self.sriov, "sriov"), (&self.slirp, "slirp"), (&self.macvtap, "macvtap")];
        if self.masquerade.is_some() {
            return NicBinding::Masquerade;
        }
        if self.bridge.is_some() {
            return NicBinding::Bridge;
        }
        if self.passt_binding.is_some() {
            return NicBinding::Passt("passtBinding");
        }
        if self.passt.is_some() {
            return NicBinding::Passt("passt");
        }
        match (&self.binding, tapless.into_iter().find(|(given, _)| given.is_some())) {
            (Some(plugin), _) => NicBinding::Plugin(&plugin.name),
            (None, Some((_, name))) => NicBinding::Tapless(name),
            (None, None) => NicBinding::Tapless("unknown"),
        }
    }

    /// The NIC of a VMI that names none: `default`, with masquerade.
    #[must_use]
    pub fn implied() -> Self {
        Self { name: "default".into(), masquerade: Some(Present), ..Self::default() }
    }
}

/// One of `spec.networks`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct VmiNetwork {
    pub name: String,
    pub multus: Option<Multus>,
}

/// `spec.networks[].multus`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Multus {
    /// True if it replaces the pod network.
    #[serde(rename = "default", deserialize_with = "or_default")]
    pub is_default: bool,
}

impl VmiNetwork {
    /// True if the NIC of this network is not the pod's first.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        self.multus.as_ref().is_some_and(|multus| !multus.is_default)
    }
}

/// One of `spec.volumes`, with the fields the feed uses.
#[derive(Clone, PartialEq, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Volume {
    pub name: String,
    cloud_init_no_cloud: Option<CloudInit>,
    cloud_init_config_drive: Option<CloudInit>,
    pub service_account: Option<ServiceAccountVolume>,
}

impl Volume {
    /// The volume's cloud-init data, from either of its two forms.
    #[must_use]
    pub fn cloud_init(&self) -> Option<&CloudInit> {
        self.cloud_init_no_cloud.as_ref().or(self.cloud_init_config_drive.as_ref())
    }
}

/// `serviceAccount` of a volume.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct ServiceAccountVolume {
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
    /// From VEP 100, which no release contains yet.
    #[serde(deserialize_with = "or_default")]
    pub meta_data: BTreeMap<String, String>,
    /// From VEP 100, too.
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
    no_cloud: Option<Present>,
    config_drive: Option<Present>,
}

impl Propagation {
    /// True if the keys reach the guest by its metadata and not by the guest agent.
    #[must_use]
    pub fn is_by_metadata(&self) -> bool {
        self.no_cloud.is_some() || self.config_drive.is_some()
    }
}

/// `status`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VmiStatus {
    /// `Pending`, `Scheduling`, `Scheduled`, `Running`, `Succeeded`, `Failed`, …
    pub phase: String,
    /// The node of each pod, by the pod's UID.
    #[serde(deserialize_with = "or_default")]
    pub active_pods: BTreeMap<String, String>,
    /// The NICs as observed.
    #[serde(deserialize_with = "or_default")]
    pub interfaces: Vec<StatusInterface>,
    /// The node that the VM is to leave, because it is drained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evacuation_node_name: Option<String>,
    /// The last live migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_state: Option<MigrationState>,
}

/// `status.migrationState`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct MigrationState {
    /// UID of the VirtualMachineInstanceMigration.
    pub migration_uid: String,
    /// When the source began to send the VM's memory.
    pub start_timestamp: Option<String>,
    /// When it was over.
    pub end_timestamp: Option<String>,
    /// The VM runs on the target.
    pub completed: bool,
    /// The VM stays on the source.
    pub failed: bool,
}

/// One of `status.interfaces`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(from = "RawStatusInterface", into = "RawStatusInterface")]
pub struct StatusInterface {
    /// The NIC's name in the VMI; `None` for an interface that only the guest agent knows.
    pub name: Option<String>,
    /// The name of the pod's NIC.
    pub pod_interface_name: Option<String>,
    /// The MAC of the NIC in the libvirt domain. `None` before the domain runs, and for a MAC that the guest agent
    /// alone reports: that one is the guest's word.
    pub mac: Option<Mac>,
}

/// What `infoSource` lists, separated by commas, if libvirt's domain has the interface.
const FROM_DOMAIN: &str = "domain";

/// [`StatusInterface`] as the API has it.
#[derive(Clone, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct RawStatusInterface {
    name: Option<String>,
    pod_interface_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mac: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    info_source: Option<String>,
}

impl From<RawStatusInterface> for StatusInterface {
    fn from(raw: RawStatusInterface) -> Self {
        let RawStatusInterface { name, pod_interface_name, mac, info_source } = raw;
        let sources = info_source.unwrap_or_default();
        let is_from_domain = sources.split(',').any(|source| source.trim() == FROM_DOMAIN);
        let mac = mac.filter(|_| is_from_domain && name.is_some()).as_deref().and_then(station_mac);
        Self { name, pod_interface_name, mac }
    }
}

impl From<StatusInterface> for RawStatusInterface {
    fn from(StatusInterface { name, pod_interface_name, mac }: StatusInterface) -> Self {
        let info_source = mac.map(|_| FROM_DOMAIN.to_owned());
        Self { name, pod_interface_name, mac: mac.map(|mac| mac.to_string()), info_source }
    }
}

/// Parses the MAC of one station, with colons or hyphens: Go's `net.ParseMAC`, by which KubeVirt reads it, accepts
/// both.
pub(super) fn station_mac(text: &str) -> Option<Mac> {
    let mac: Mac = text.replace('-', ":").parse().ok()?;
    (!mac.is_group() && mac != Mac::default()).then_some(mac)
}

/// Decodes `null` like an absent field.
fn or_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::{NicBinding, Vmi};
    use serde_json::json;

    #[test]
    fn unknown_and_null_fields_are_ignored() {
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
    fn an_unexpected_form_is_refused_by_its_field_name_alone() {
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
    fn the_debug_form_of_a_vmi_omits_its_content() {
        let text = br#"{"metadata": {"name": "a", "namespace": "b"},
            "spec": {"volumes": [{"cloudInitNoCloud": {"userData": "hunter2"}}]}}"#;
        assert_eq!(format!("{:?}", Vmi::read(text).expect("a VMI")), "Vmi(b/a)");
    }

    #[test]
    fn bindings_are_known_by_their_names() {
        let cases = [
            (json!({"masquerade": {}}), NicBinding::Masquerade),
            (json!({"bridge": {}}), NicBinding::Bridge),
            (json!({"binding": {"name": "managed"}}), NicBinding::Plugin("managed")),
            (json!({"sriov": {}}), NicBinding::Tapless("sriov")),
            (json!({"passtBinding": {}}), NicBinding::Passt("passtBinding")),
            (json!({"passt": {}}), NicBinding::Passt("passt")),
            (json!({"slirp": {}}), NicBinding::Tapless("slirp")),
            (json!({"macvtap": {}}), NicBinding::Tapless("macvtap")),
            (json!({"vhostuser": {}}), NicBinding::Tapless("unknown")),
        ];
        for (given, binding) in cases {
            let vmi = json!({"spec": {"domain": {"devices": {"interfaces": [given]}}}});
            let vmi = Vmi::from_value(vmi).expect("a VMI");
            assert_eq!(vmi.spec.domain.devices.interfaces[0].binding(), binding, "{given}");
        }
    }

    #[test]
    fn the_mac_of_a_status_entry_is_that_of_the_domain_or_none() {
        let guest_agent = "02:00:00:00:00:01";
        let cases = [
            (json!({"name": "a", "mac": guest_agent, "infoSource": "domain"}), true),
            (json!({"name": "a", "mac": guest_agent, "infoSource": "domain, guest-agent"}), true),
            (json!({"name": "a", "mac": guest_agent, "infoSource": "multus-status,domain"}), true),
            (json!({"name": "a", "mac": "02-00-00-00-00-01", "infoSource": "domain"}), true),
            (json!({"name": "a", "mac": guest_agent, "infoSource": "guest-agent"}), false),
            (json!({"name": "a", "mac": guest_agent, "infoSource": "subdomain"}), false),
            (json!({"name": "a", "mac": guest_agent}), false),
            (json!({"mac": guest_agent, "infoSource": "domain"}), false),
            (json!({"name": "a", "mac": "01:00:00:00:00:01", "infoSource": "domain"}), false),
            (json!({"name": "a", "mac": "00:00:00:00:00:00", "infoSource": "domain"}), false),
            (json!({"name": "a", "mac": "none", "infoSource": "domain"}), false),
            (json!({"name": "a", "mac": null, "infoSource": null}), false),
        ];
        for (given, is_known) in cases {
            let vmi = json!({"metadata": {"name": "a", "namespace": "b"}, "status": {"interfaces": [given]}});
            let vmi = Vmi::from_value(vmi).expect("a VMI");
            let mac = vmi.status.interfaces[0].mac.map(|mac| mac.to_string());
            assert_eq!(mac.as_deref(), is_known.then_some(guest_agent), "{given}");
            // The next agent must know it too, before the API server answers.
            assert_eq!(Vmi::read(&serde_json::to_vec(&vmi).expect("JSON")), Ok(vmi), "{given}");
        }
    }

    #[test]
    fn pods_are_those_of_the_node() {
        let vmi = json!({"status": {"activePods": {"u1": "n1", "u2": "n2", "u3": "n1"}}});
        let vmi = Vmi::from_value(vmi).expect("a VMI");
        assert_eq!(vmi.pods_on("n1").collect::<Vec<_>>(), ["u1", "u3"]);
    }
}
