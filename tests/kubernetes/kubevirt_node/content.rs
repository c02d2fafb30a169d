//! Guests get the content of their own VMI and Secrets in every dialect, and no other guest's.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use metadata_content::record::Dialect;
use metadata_control::status::InstanceState;
use metadata_feed::pods::names_of;
use serde_json::{Value, json};
use support::guest::{Guest, METADATA, NIC, Route};
use support::pod::{Binding, Plugin};
use support::tap::Shape;

use super::node::{Node, REQUEST, eventually_gets, gets, may_run, wait_for};

const KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8wUQ0H0m1c3a0nYf1mVYQx0b7m2wq8q0R4T0qX9V1k alice@shop";
const USER_DATA: &str = "#cloud-config\n# its own\n";
/// Metadata addresses of other dialects.
const ALIYUN: &str = "100.100.100.200";
const SCALEWAY: &str = "169.254.42.42";

/// A request to each dialect: curl's arguments and a text that the answer must contain. `{id}` is the VM's UUID,
/// `{mac}` its MAC, `{jwt}` its token; `{aliyun}` and `{akamai}` are session tokens.
const ASKED: &[(Dialect, &str, &[&str], &str)] = &[
    (Dialect::NoCloud, "/v1/meta-data", &[], "instance-id: \"{id}\""),
    (Dialect::NoCloud, "/v1/meta-data", &[], "role: web"),
    (Dialect::NoCloud, "/v1/meta-data", &[], KEY),
    (Dialect::NoCloud, "/v1/user-data", &[], USER_DATA),
    (Dialect::NoCloud, "/v1/vendor-data", &[], "# of the vendor"),
    (Dialect::NoCloud, "/v1/network-config", &[], "version: 2"),
    (Dialect::Kubevirt, "/v1/token", &["-HMetadata: true"], "{jwt}"),
    (
        Dialect::Kubevirt,
        "/v1/identity",
        &["-HMetadata: true"],
        r#"{"namespace":"shop","serviceAccountName":"robot","vmName":"guest-1"}"#,
    ),
    (Dialect::OpenStack, "/openstack", &[], "latest"),
    (Dialect::OpenStack, "/openstack/latest/meta_data.json", &[], "{id}"),
    (Dialect::OpenStack, "/openstack/latest/meta_data.json", &[], KEY),
    (Dialect::OpenStack, "/openstack/latest/user_data", &[], USER_DATA),
    (Dialect::OpenStack, "/openstack/latest/vendor_data.json", &[], "# of the vendor"),
    (Dialect::OpenStack, "/openstack/latest/network_data.json", &[], "{mac}"),
    (Dialect::Ec2, "/latest/meta-data/local-hostname", &[], "guest-1"),
    (Dialect::Ec2, "/latest/meta-data/instance-type", &[], "small"),
    (Dialect::Ec2, "/latest/meta-data/public-keys/0/openssh-key", &[], KEY),
    (Dialect::Ec2, "/latest/meta-data/network/interfaces/macs/", &[], "{mac}"),
    (Dialect::Ec2, "/2009-04-04/user-data", &[], USER_DATA),
    (Dialect::Gce, "/computeMetadata/v1/instance/hostname", &["-HMetadata-Flavor: Google"], "guest-1"),
    (
        Dialect::Azure,
        "/metadata/instance/compute/vmId?api-version=2021-08-01&format=text",
        &["-HMetadata: true"],
        "{id}",
    ),
    (Dialect::DigitalOcean, "/metadata/v1.json", &[], "guest-1"),
    (Dialect::UpCloud, "/metadata/v1/instance_id", &[], "{id}"),
    (Dialect::Hetzner, "/hetzner/v1/userdata", &[], USER_DATA),
    (Dialect::Vultr, "/v1.json", &["-HMetadata-Token: cloudinit"], "guest-1"),
    (Dialect::Oracle, "/opc/v2/instance/", &["-HAuthorization: Bearer Oracle"], "guest-1"),
    (Dialect::Akamai, "/v1/instance", &["-HMetadata-Token: {akamai}", "-HAccept: application/json"], "{id}"),
    (Dialect::Nwcs, "/api/v1/metadata/instance-id", &[], "{id}"),
    (Dialect::CloudCix, "/v1/metadata", &[], "guest-1"),
    (Dialect::CloudStack, ":8080/", &["-HDomU_Request: saved_password"], "saved_password"),
    (Dialect::Exoscale, "/1.0/user-data", &[], USER_DATA),
    (Dialect::AliYun, "/latest/meta-data/hostname", &["-HX-aliyun-ecs-metadata-token: {aliyun}"], "guest-1"),
    (Dialect::Scaleway, "/conf?format=json", &[], "{id}"),
    (Dialect::Maas, "/MAAS/metadata/2012-03-01/meta-data/instance-id", &[], "{id}"),
    (Dialect::Eve, "/eve/v1/hostname", &[], "{id}"),
];

/// An unsigned JWT (RFC 7519), valid until 2099.
fn jwt() -> String {
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    format!("{}.{}.c2ln", part(json!({"alg": "none"})), part(json!({"exp": 4_102_444_799_u64})))
}

/// Gets a session token, which some clouds require.
fn session(guest: &Guest, address: &str, path: &str, lifetime: &str) -> String {
    let got = guest.curl(&["-XPUT", lifetime, &format!("http://{address}{path}")], REQUEST).expect("a token");
    assert_eq!(got.status, 200, "{address}{path}: {}", got.text());
    got.text().trim().to_owned()
}

#[test]
fn a_guest_in_a_pod_gets_its_vmis_and_secrets_content_in_every_dialect() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let mut vmi = pod.vmi();
    vmi["metadata"]["annotations"] = json!({
        "imds.kubevirt.io/enabled": "true",
        "imds.kubevirt.io/vendor-data": "#cloud-config\n# of the vendor\n",
        "kubevirt.io/cluster-instancetype-name": "small",
    });
    vmi["spec"]["serviceAccountName"] = "robot".into();
    vmi["spec"]["volumes"][0]["cloudInitNoCloud"]["networkData"] = "version: 2\nethernets: {}\n".into();
    vmi["spec"]["volumes"][0]["cloudInitNoCloud"]["metaData"] = json!({"role": "web"});
    vmi["spec"]["accessCredentials"] = json!([{"sshPublicKey": {
        "source": {"secret": {"secretName": "alice"}}, "propagationMethod": {"noCloud": {}},
    }}]);
    pod.secret(USER_DATA);
    pod.write(Plugin::Secret, "alice-access-cred", &[("key", KEY.as_bytes())]);
    pod.write(Plugin::Projected, "imds-token", &[("token", jwt().as_bytes())]);
    pod.launch();
    let guest = pod.boot();
    for address in [ALIYUN, SCALEWAY] {
        guest.ns().ip(&format!("route add {address} dev {NIC} scope link")).expect("a route");
    }
    // Skip the schema, because no KubeVirt release has `metaData` yet.
    node.server.put_as_it_is(vmi);
    eventually_gets(&agent, &guest, "/v1/user-data", USER_DATA);
    let aliyun =
        session(&guest, ALIYUN, "/latest/api/token", "-HX-aliyun-ecs-metadata-token-ttl-seconds: 600");
    let akamai = session(&guest, &METADATA.to_string(), "/v1/token", "-HMetadata-Token-Expiry-Seconds: 300");
    let akamai: String = serde_json::from_str::<Vec<String>>(&akamai).map_or(akamai, |list| list.concat());
    let fill = |text: &str| {
        let text = text.replace("{id}", &pod.identity.instance_id).replace("{jwt}", &jwt());
        let text = text.replace("{mac}", &pod.identity.mac.to_string());
        text.replace("{aliyun}", &aliyun).replace("{akamai}", &akamai)
    };
    for (dialect, path, words, wanted) in ASKED {
        let address = match dialect {
            Dialect::AliYun => ALIYUN.to_owned(),
            Dialect::Scaleway => SCALEWAY.to_owned(),
            _ => METADATA.to_string(),
        };
        let url = format!("http://{address}{path}");
        let words: Vec<_> = words.iter().map(|word| fill(word)).chain([url]).collect();
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let got = guest.curl(&words, REQUEST).unwrap_or_else(|error| panic!("{dialect:?} {path}: {error:#}"));
        let text = got.text();
        assert!(
            got.status == 200 && text.contains(&fill(wanted)),
            "{dialect:?} {path}: {} {text}",
            got.status
        );
    }
    for (names, description) in metadata_content::dialect::all() {
        for name in names.iter().filter(|name| !ASKED.iter().any(|(asked, ..)| asked == *name)) {
            // A dialect that is not in `ASKED` has a document with the VM's UUID at its first mount.
            let path = description.mounts[0].path;
            let got = guest.curl(&[&format!("http://{METADATA}{path}")], REQUEST).expect("an answer");
            let text = got.text();
            assert!(got.status == 200 && text.contains(&pod.identity.instance_id), "{name:?} {path}: {text}");
        }
    }
}

#[test]
fn a_rewritten_secret_is_served_from_then_on() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# first\n");
    for text in ["# first\n", "# second\n", "# third\n"] {
        pod.secret(text);
        eventually_gets(&agent, &guest, "/v1/user-data", text);
    }
    let generation = node.instances().expect("instances").first().and_then(|instance| instance.generation);
    assert!(generation.is_some());
}

#[test]
fn guests_with_one_mac_in_two_pods_get_their_own_records() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pods = [node.pod(1), node.pod(2)];
    pods[1].identity.mac = pods[0].identity.mac;
    let guests = [pods[0].run("# first\n"), pods[1].run("# second\n")];
    for (guest, text) in guests.iter().zip(["# first\n", "# second\n"]) {
        eventually_gets(&agent, guest, "/v1/user-data", text);
    }
    // This also holds after one record changes and after one pod ends.
    pods[0].secret("# changed\n");
    eventually_gets(&agent, &guests[0], "/v1/user-data", "# changed\n");
    gets(&guests[1], "/v1/user-data", "# second\n").expect("its own");
    let ([first, second], [guest, other]) = (pods, guests);
    drop((first, guest));
    gets(&other, "/v1/user-data", "# second\n").expect("its own");
    drop((second, other));
}

#[test]
fn both_bindings_are_served_and_so_is_a_nic_plugged_in_later() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.secret("# bridged\n");
    pod.launch();
    // The bridge binding uses the MAC of the pod's NIC.
    let mut vmi = pod.vmi();
    vmi["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "bridge": {}}]);
    let guest = pod.boot_as(Binding::Bridge, Route::OnLink);
    node.server.put(vmi.clone());
    eventually_gets(&agent, &guest, "/v1/user-data", "# bridged\n");

    let names = names_of("red", Some(1)).remove(0);
    let mut plugged = node.pod(2);
    vmi["spec"]["networks"] = json!([
        {"name": "default", "pod": {}},
        {"name": "red", "multus": {"networkName": "shop/red"}},
    ]);
    vmi["spec"]["domain"]["devices"]["interfaces"] = json!([
        {"name": "default", "bridge": {}},
        {"name": "red", "bridge": {}, "macAddress": plugged.identity.mac.to_string()},
    ]);
    node.server.put(vmi);
    pod.network.add_nic(&names, plugged.identity.mac).expect("a second NIC");
    let tap = pod.network.bind(&names, Binding::Bridge, Shape::virtio()).expect("a second tap");
    plugged.identity.hostname.clone_from(&pod.identity.hostname);
    let second = plugged.guest_on(tap, Route::OnLink);
    eventually_gets(&agent, &second, "/v1/user-data", "# bridged\n");
    gets(&guest, "/v1/user-data", "# bridged\n").expect("through the first NIC as well");
    wait_for(&agent, "two ports", || {
        let ports = node.instances()?.first().map(|instance| instance.ports.len());
        anyhow::ensure!(ports == Some(2), "{ports:?} ports");
        Ok(())
    });
}

#[test]
fn a_vm_without_a_launcher_is_reported_until_it_is_served() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    node.server.put(pod.vmi());
    wait_for(&agent, "the refusal", || {
        let refused = node.status()?.refused;
        let reasons: Vec<_> = refused.iter().filter(|of| of.record.ends_with(&pod.key())).collect();
        anyhow::ensure!(reasons.iter().any(|of| of.reason.contains("the launcher of pod")), "{refused:?}");
        let (instances, events) = (node.instances()?, node.server.events());
        anyhow::ensure!(instances.iter().any(|of| of.state == InstanceState::Rejected), "{instances:?}");
        anyhow::ensure!(events.iter().any(|made| made == "ImdsDegraded shop/guest-1"), "{events:?}");
        Ok(())
    });
    let guest = pod.boot();
    pod.secret("# late\n");
    pod.launch();
    eventually_gets(&agent, &guest, "/v1/user-data", "# late\n");
    wait_for(&agent, "no refusal", || {
        let refused = node.status()?.refused;
        anyhow::ensure!(refused.is_empty(), "{refused:?}");
        Ok(())
    });
}

#[test]
fn an_event_says_ready_once_the_tap_is_attached_and_names_both_macs_of_a_mismatch() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    // The record has the MAC of the pod's NIC, and the guest another.
    let nic = "0a:58:0a:80:00:05";
    let (mut pod, mut other) = (node.pod_on(1, nic.parse().expect("a MAC")), node.pod(2));
    let known = pod.vmi_without_mac(Binding::Masquerade);
    let mut vmi = known.clone();
    vmi["status"]["interfaces"] = json!([]);
    pod.secret("# known\n");
    pod.launch();
    node.server.put(vmi);
    let served = other.run("# served\n");
    eventually_gets(&agent, &served, "/v1/user-data", "# served\n");
    let reasons = |name: &str| -> Vec<String> {
        node.server.events_on(name).into_iter().map(|(reason, _)| reason).collect()
    };
    wait_for(&agent, "one VM is ready, the other waits for its tap", || {
        let instances = node.instances()?;
        let waits = instances.iter().any(|of| of.name == pod.key() && of.state == InstanceState::Waiting);
        anyhow::ensure!(waits && reasons("guest-2") == ["ImdsReady"], "{instances:?}");
        Ok(())
    });
    assert_eq!(reasons("guest-1"), [""; 0], "it has a record, and no tap");
    let guest = pod.boot();
    wait_for(&agent, "it is ready with its tap", || {
        anyhow::ensure!(reasons("guest-1") == ["ImdsReady"], "{:?}", reasons("guest-1"));
        Ok(())
    });
    let both = [nic.to_owned(), pod.identity.mac.to_string()];
    wait_for(&agent, "both MACs", || {
        // Each attempt sends frames; the programs report the first, second, fourth, eighth….
        let _dropped = guest.fetch("/v1/user-data", std::time::Duration::from_millis(500));
        let events = node.server.events_on("guest-1");
        let named = |(reason, text): &(String, String)| {
            reason == "ImdsDegraded" && both.iter().all(|mac| text.contains(mac))
        };
        anyhow::ensure!(events.last().is_some_and(named), "{events:?}");
        Ok(())
    });
    node.server.put(known);
    eventually_gets(&agent, &guest, "/v1/user-data", "# known\n");
    wait_for(&agent, "it is ready again", || {
        let reasons = reasons("guest-1");
        anyhow::ensure!(reasons == ["ImdsReady", "ImdsDegraded", "ImdsReady"], "{reasons:?}");
        Ok(())
    });
    assert!(!agent.log().contains("WARN port"), "a tap that appears later is no fault:\n{}", agent.log());
}

#[test]
fn an_unservable_vm_is_reported_in_the_status_and_in_an_event() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let agent = node.agent();
    let (mut pod, mut other) = (node.pod(1), node.pod(2));
    let mut vmi = pod.vmi();
    vmi["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "sriov": {}}]);
    pod.launch();
    node.server.put(vmi);
    let guest = other.run("# served\n");
    eventually_gets(&agent, &guest, "/v1/user-data", "# served\n");
    wait_for(&agent, "the refusal", || {
        let refused = node.status()?.refused;
        let reasons: Vec<_> = refused.iter().filter(|of| of.record.ends_with(&pod.key())).collect();
        anyhow::ensure!(reasons.iter().any(|of| of.reason.contains("binding `sriov`")), "{refused:?}");
        let (events, wanted) =
            (node.server.events(), ["ImdsDegraded shop/guest-1", "ImdsReady shop/guest-2"]);
        anyhow::ensure!(wanted.iter().all(|event| events.iter().any(|made| made == event)), "{events:?}");
        Ok(())
    });
}
