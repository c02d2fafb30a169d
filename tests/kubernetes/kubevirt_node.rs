//! A KubeVirt node end to end: the real agent gets VMs from an API server, finds their launchers, and serves guests
//! behind taps in their pods' namespaces.
//!
//! The API server, launchers, control groups and kubelet come from `support`; everything else is production code.

mod departures;
mod node;
mod outages;
mod passt;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use metadata_content::record::Dialect;
use metadata_control::instances::Instance;
use metadata_control::status::InstanceState;
use metadata_feed::pods::names_of;
use node::{
    HERE, Node, PATIENCE, REQUEST, eventually_gets, gets, may_run, primary, vmi, wait_for,
    wait_until_namespace_is_gone,
};
use serde_json::{Value, json};
use support::agent::Agent;
use support::guest::{Guest, METADATA, NIC, Route};
use support::netns::{Namespace, run};
use support::pod::{Binding, How, Launcher, Plugin, PodNetwork, fresh_uid};
use support::record::Identity;
use support::tap::{Shape, Tap};
use support::tap_client::storm;

// Guests get the content of their own VMI and Secrets in every dialect, and no other guest's.

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

#[support::privileged::test(may_run)]
fn a_guest_in_a_pod_gets_its_vmis_and_secrets_content_in_every_dialect() {
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

#[support::privileged::test(may_run)]
fn a_rewritten_secret_is_served_from_then_on() {
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

#[support::privileged::test(may_run)]
fn guests_with_one_mac_in_two_pods_get_their_own_records() {
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

#[support::privileged::test(may_run)]
fn both_bindings_are_served_and_so_is_a_nic_plugged_in_later() {
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

#[support::privileged::test(may_run)]
fn a_vm_without_a_launcher_is_reported_until_it_is_served() {
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

#[support::privileged::test(may_run)]
fn an_event_says_ready_once_the_tap_is_attached_and_names_both_macs_of_a_mismatch() {
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
        let _dropped = guest.fetch("/v1/user-data", Duration::from_millis(500));
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

#[support::privileged::test(may_run)]
fn an_unservable_vm_is_reported_in_the_status_and_in_an_event() {
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

// VMs that appear before their tap, before their Secret, after their guest's first request, and a thousand at once.

const PATH: &str = "/v1/user-data";
/// The same document in OpenStack's tree, where the agent holds an early request for 8 s instead of 4 s.
const HELD: &str = "/openstack/latest/user_data";

/// Sends a request on another thread, runs `meanwhile`, and returns the answer.
#[track_caller]
fn fetch_while(agent: &Agent<'_>, guest: &Guest, meanwhile: impl FnOnce()) -> (u16, String) {
    let fetched = thread::scope(|scope| {
        let asked = scope.spawn(|| guest.fetch(HELD, REQUEST));
        meanwhile();
        asked.join().expect("no panic")
    });
    let fetched = fetched.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    (fetched.status, fetched.text())
}

/// Number of requests that the agent holds.
fn held_requests(agent: &Agent<'_>) -> anyhow::Result<u64> {
    let metrics = agent.metrics()?;
    let held = metrics.samples().iter().filter(|sample| sample.name == "xdp_imds_parked_requests");
    Ok(held.map(|sample| sample.value as u64).sum())
}

#[support::privileged::test(may_run)]
fn a_request_before_the_vmi_is_known_is_answered_once_it_is() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.secret("# early\n");
    pod.launch();
    // The guest's route leads through its gateway, as in KubeVirt, so its TCP retransmits until the agent answers.
    let guest = pod.boot_as(Binding::Masquerade, Route::Gateway);
    let answer = fetch_while(&agent, &guest, || {
        wait_for(&agent, "the guest sends a request", || {
            ensure!(guest.sent().delivered > 1, "the guest has not sent anything yet");
            Ok(())
        });
        node.server.put(pod.vmi());
    });
    assert_eq!(answer, (200, "# early\n".into()));
}

#[support::privileged::test(may_run)]
fn a_request_before_the_secret_exists_is_held_until_it_does() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.launch();
    let guest = pod.boot();
    node.server.put(pod.vmi());
    wait_for(&agent, "its port", || {
        ensure!(agent.log().contains("attached"), "the tap is not attached yet");
        Ok(())
    });
    let answer = fetch_while(&agent, &guest, || {
        wait_for(&agent, "a request that waits", || {
            ensure!(held_requests(&agent)? == 1, "the agent does not hold exactly one request");
            Ok(())
        });
        pod.secret("# at last\n");
    });
    assert_eq!(answer, (200, "# at last\n".into()));
    wait_for(&agent, "nothing waits", || {
        ensure!(held_requests(&agent)? == 0, "the agent still holds a request");
        Ok(())
    });
}

#[support::privileged::test(may_run)]
fn a_tap_created_after_its_vmi_is_served() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.secret("# late\n");
    node.server.put(pod.vmi());
    pod.launch();
    wait_for(&agent, "a search for the tap", || {
        ensure!(agent.log().contains("no such interface yet"), "the agent has not searched yet");
        Ok(())
    });
    let guest = pod.boot();
    eventually_gets(&agent, &guest, PATH, "# late\n");
}

#[support::privileged::test(may_run)]
fn a_launcher_started_after_its_vmi_is_found() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    node.server.put(pod.vmi());
    wait_for(&agent, "the VMI is kept", || {
        ensure!(node.saved_vmis().contains(&pod.identity.hostname), "the VMI is not saved yet");
        Ok(())
    });
    let guest = pod.boot();
    pod.secret("# late\n");
    pod.launch();
    eventually_gets(&agent, &guest, PATH, "# late\n");
}

/// VMIs of the storm, and how many of them have taps and guests. The others share a namespace without devices.
const VMIS: u16 = 1_000;
const GUESTS: u16 = 64;
/// Bound on answering all guests: the kernel verifies a program for each namespace.
const STORM: Duration = Duration::from_secs(300);
/// Time in which the VMIs appear.
const SPAN: Duration = Duration::from_secs(2);

#[support::privileged::test(may_run)]
fn a_thousand_vmis_within_two_seconds_are_registered_and_their_guests_served() {
    let node = Node::new();
    let agent = node.agent();
    let mut networks = Vec::new();
    let mut guests: Vec<(Identity, Arc<Tap>)> = Vec::new();
    for identity in (0..GUESTS).map(Identity::of) {
        let network = PodNetwork::new(node.host.ns()).expect("a namespace");
        network.add_nic(&primary(), identity.mac).expect("a NIC");
        guests.push((
            identity,
            network.bind(&primary(), Binding::Masquerade, Shape::default()).expect("a tap"),
        ));
        networks.push(network);
    }
    let crowd = Namespace::new("crowd").expect("a namespace");
    let all: Vec<(Identity, String)> = (0..VMIS).map(|n| (Identity::of(n), fresh_uid())).collect();
    let _launchers: Vec<Launcher> = all
        .iter()
        .zip(networks.iter().map(|network| Some(network.ns())).chain(std::iter::repeat(None)))
        .map(|((_, uid), ns)| {
            Launcher::start(ns.unwrap_or(&crowd), &node.kubelet, &node.cgroups, uid, How::default())
                .expect("a launcher")
        })
        .collect();
    let outcomes = thread::scope(|scope| {
        let asked = scope.spawn(|| storm(guests.clone(), &[PATH], STORM));
        for (identity, uid) in &all {
            let mut vmi = vmi(identity, uid);
            vmi["spec"]["volumes"] =
                json!([{"name": "ci", "cloudInitNoCloud": {"userData": identity.user_data}}]);
            node.server.put(vmi);
            // Close a watch now and then; it must resume from its last event.
            match identity.number % 400 {
                100 => node.server.bookmark(),
                200 => node.server.cut(),
                _ => {}
            }
            thread::sleep(SPAN / u32::from(VMIS));
        }
        asked.join().expect("no panic")
    });
    for outcome in outcomes {
        let name = &outcome.identity.hostname;
        let answers = outcome.answers.unwrap_or_else(|error| panic!("{name}: {error:#}\n{}", agent.log()));
        let texts: Vec<_> = answers.iter().map(|answer| String::from_utf8_lossy(&answer.body)).collect();
        assert_eq!(texts, [outcome.identity.user_data.as_str()], "{name}");
    }
    let wanted: BTreeSet<String> =
        all.iter().map(|(identity, _)| format!("shop/{}", identity.hostname)).collect();
    let instances = wait_for(&agent, "all of them", || {
        let instances = node.instances()?;
        ensure!(instances.len() == wanted.len(), "{} of {}", instances.len(), wanted.len());
        Ok(instances)
    });
    let names: BTreeSet<String> = instances.iter().map(|instance| instance.name.clone()).collect();
    assert_eq!(names, wanted);
    let good = |instance: &&Instance| instance.in_force && instance.refused.is_none();
    assert_eq!(instances.iter().filter(good).count(), wanted.len());
    let status = node.status().expect("a status");
    assert_eq!(status.identities, u64::from(GUESTS), "{:?}", status.ports.counts);
}

// KubeVirt's node hook: VMs are served without the API server, and start once their volumes are ready.

const METHOD: &str = "/kubevirt.hooks.plugins.v1alpha1.NodeHookService/ExecuteNodeHook";

/// A length-delimited field of a protobuf message (wire type 2).
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut length = bytes.len();
    while length >= 0x80 {
        field.push(length as u8 | 0x80);
        length >>= 7;
    }
    field.push(length as u8);
    field.extend(bytes);
    field
}

/// Calls the hook as virt-handler does, using curl's HTTP/2. Returns the gRPC status.
fn call(node: &Node, point: &str, vmi: &Value) -> String {
    let message = [
        field(1, point.as_bytes()),
        field(2, vmi.to_string().as_bytes()),
        field(3, &field(1, HERE.as_bytes())),
    ]
    .concat();
    let length = u32::try_from(message.len()).expect("a short message").to_be_bytes();
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), [&[0][..], &length, &message].concat()).expect("written");
    let mut curl = Command::new("curl");
    curl.args(["-sS", "--http2-prior-knowledge", "--noproxy", "*", "--max-time"]);
    curl.arg(PATIENCE.as_secs().to_string()).args(["--dump-header", "-", "--output", "/dev/null"]);
    curl.arg("--unix-socket")
        .arg(socket(node))
        .arg("--data-binary")
        .arg(format!("@{}", file.path().display()));
    curl.args(["-Hcontent-type: application/grpc", "-Hte: trailers"])
        .arg(format!("http://localhost{METHOD}"));
    let output = run(&mut curl).unwrap_or_else(|error| panic!("{point}: {error:#}"));
    let status = output.lines().find_map(|line| line.strip_prefix("grpc-status:"));
    status.unwrap_or_else(|| panic!("{point}: no status: {output}")).trim().to_owned()
}

fn socket(node: &Node) -> PathBuf {
    node.path("hook.sock")
}

#[support::privileged::test(may_run)]
fn a_vm_known_only_from_the_hook_is_served_and_starts_once_its_secret_exists() {
    let node = Node::new();
    let hook = socket(&node);
    node.configure(&json!({"watch": false, "hook": hook}));
    let agent = node.agent();
    let mut pod = node.pod(1);
    let vmi = pod.vmi();
    pod.launch();
    // 14 is UNAVAILABLE; virt-handler calls again.
    assert_eq!(call(&node, "PreVMStart", &vmi), "14", "{}", agent.log());
    pod.secret("# hooked\n");
    wait_for(&agent, "its start", || {
        anyhow::ensure!(call(&node, "PreVMStart", &vmi) == "0", "the hook does not let the VM start");
        Ok(())
    });
    assert_eq!(node.instances().expect("instances").len(), 1, "the record exists when the VM may start");
    let guest = pod.boot();
    eventually_gets(&agent, &guest, PATH, "# hooked\n");
    // The hook announces the target of a migration before the target has a launcher or a tap.
    let mut coming = node.pod(2);
    assert_eq!(call(&node, "PreMigrationTarget", &coming.vmi()), "0");
    coming.secret("# coming\n");
    coming.launch();
    let other = coming.boot();
    eventually_gets(&agent, &other, PATH, "# coming\n");
    let outer = pod.end(guest);
    assert_eq!(call(&node, "PostVMStop", &vmi), "0");
    wait_until_namespace_is_gone(&agent, &node, &outer);
    gets(&other, PATH, "# coming\n").expect("the other is served");
}

// A live migration waits in the node hook until its guest is ready.

#[support::privileged::test(may_run)]
fn a_live_migration_waits_for_its_guest_if_that_is_asked_for() {
    let node = Node::new();
    node.configure(&json!({"hook": socket(&node), "hold_seconds": 30}));
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# its own\n");
    eventually_gets(&agent, &guest, PATH, "# its own\n");
    assert_eq!(call(&node, "PreMigrationSource", &pod.vmi()), "0", "it does not migrate");
    let mut vmi = pod.vmi();
    vmi["status"]["migrationState"] = json!({"migrationUid": "m-1", "sourceNode": "a", "targetNode": "b"});
    thread::scope(|scope| {
        // virt-handler may know of the migration earlier than the agent.
        let migrates = scope.spawn(|| call(&node, "PreMigrationSource", &vmi));
        node.server.put(vmi.clone());
        let url = format!("http://{METADATA}/v1/events/migration-m-1");
        wait_for(&agent, "the guest is told", || {
            let told = guest.curl(&[&url], PATIENCE)?;
            anyhow::ensure!(told.status == 200, "{} {}", told.status, told.text());
            Ok(())
        });
        assert!(!migrates.is_finished(), "it goes on without its guest");
        assert_eq!(guest.curl(&["-X", "POST", &url], PATIENCE).expect("an answer").status, 204);
        assert_eq!(migrates.join().expect("no panic"), "0");
    });
    assert_eq!(call(&node, "PreMigrationSource", &vmi), "0", "virt-handler repeats its call");
    assert!(!agent.log().contains("has not acknowledged its migration"), "it waited for the limit");
}
