//! Guests get what Nova gives to a client that asks it directly, as Neutron's agents do.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use support::cloudinit::{CloudInit, Machine, Release};
use support::eventually;
use support::guest::{Fetched, METADATA};
use support::record::Identity;

use super::nova::Nova;
use super::{ADDRESS, Instance, META_DATA, NOTICE, Node, PASSWORD, PATIENCE, gets};

/// What a client sees of an answer, but for what is the agent's own: the body of an error, and the random seed.
#[derive(Debug, PartialEq, Eq)]
struct NovaAnswer {
    status: u16,
    content_type: Option<String>,
    body: Vec<u8>,
}

impl NovaAnswer {
    /// Reads what curl has printed for `-i`.
    fn of(fetched: &Fetched) -> Result<Self> {
        const END: &[u8] = b"\r\n\r\n";
        let end = fetched.body.windows(END.len()).position(|part| part == END).context("a head")?;
        let (head, body) = (String::from_utf8_lossy(&fetched.body[..end]), &fetched.body[end + END.len()..]);
        if fetched.status != 200 {
            return Ok(Self { status: fetched.status, content_type: None, body: Vec::new() });
        }
        let content_type = head.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("content-type").then(|| value.to_owned())
        });
        Ok(Self { status: fetched.status, content_type, body: without_seed(body) })
    }
}

/// The body with zeros in place of a random seed.
fn without_seed(body: &[u8]) -> Vec<u8> {
    const NAME: &[u8] = b"\"random_seed\": \"";
    let mut body = body.to_owned();
    if let Some(at) = body.windows(NAME.len()).position(|part| part == NAME) {
        body[at + NAME.len()..].iter_mut().take_while(|byte| **byte != b'"').for_each(|byte| *byte = b'0');
    }
    body
}

/// Both answers to a request: through the agent, and from Nova.
fn both(node: &Node, instance: &Instance, words: &[&str], path: &str) -> Result<[NovaAnswer; 2]> {
    let words: Vec<_> = ["-i", "--path-as-is"].iter().chain(words).copied().collect();
    let url = format!("http://{METADATA}{path}");
    let all: Vec<_> = words.iter().copied().chain([&*url]).collect();
    let through = instance.guest.curl(&all, PATIENCE)?;
    let direct = Nova::ask(node.host.ns(), instance, &words, path)?;
    Ok([NovaAnswer::of(&through)?, NovaAnswer::of(&direct)?])
}

#[test]
fn guests_get_every_document_of_nova_byte_for_byte() {
    /// Paths beside those that Nova lists.
    const UNLISTED: [&str; 12] = [
        "/",
        "/openstack",
        "//openstack",
        "/openstack/latest/",
        "/openstack/latest/user_data?a=%20b",
        "/openstack/latest/user_data?a=\"<b>\"",
        "/openstack/latest/nothing",
        "/openstack/1999-01-01/meta_data.json",
        "/openstack/content/0000",
        "/ec2",
        "/latest/meta-data/hostname/x",
        "/latest/meta%2Ddata/hostname",
    ];
    let Some(node) = Node::or_skip() else { return };
    let long = Identity { address: ADDRESS, ..Identity::of(1).with_user_data_of(48_000) };
    let instances = [node.boot(0).expect("an instance"), node.boot_unknown(long).expect("a guest")];
    node.nova.add(&instances[1]).expect("stored");
    instances.iter().for_each(|instance| node.bind(instance).expect("bound"));
    let _agent = node.agent().expect("an agent");
    for instance in &instances {
        let Instance { guest, identity, .. } = instance;
        eventually(NOTICE, || gets(guest, META_DATA, 200, &identity.instance_id)).expect("meta-data");
        let mut paths: Vec<_> = UNLISTED.map(str::to_owned).into();
        paths.extend(["/openstack/", "/latest/", "/2009-04-04/"].map(str::to_owned));
        let (mut found, mut other) = (BTreeMap::new(), Vec::new());
        while let Some(path) = paths.pop() {
            let [through, direct] = both(&node, instance, &[], &path).expect("answers");
            if through != direct {
                other.push(format!("{path}: {through:?} instead of {direct:?}"));
            }
            if path.len() > 1 && path.ends_with('/') {
                for line in String::from_utf8_lossy(&direct.body).lines() {
                    paths.push(match line.split_once('=') {
                        Some((key, _)) => format!("{path}{key}/"),
                        None if path == "/openstack/" => format!("{path}{line}/"),
                        None => format!("{path}{line}"),
                    });
                }
            }
            found.insert(path, direct.status);
        }
        assert!(other.is_empty(), "{}", other.join("\n"));
        let count = found.values().filter(|status| **status == 200).count();
        assert!(
            count > 100 && found.contains_key("/latest/meta-data/public-keys/0/openssh-key"),
            "{found:?}"
        );
        // What Nova does with other methods.
        for (words, path, status) in [
            (&["-XPUT"][..], "/openstack/latest/user_data", 200),
            (&["-XPUT"], PASSWORD, 400),
            (&["-d", &*"x".repeat(1_021)], PASSWORD, 400),
        ] {
            let [through, direct] = both(&node, instance, words, path).expect("answers");
            assert_eq!((through.status, &through), (status, &direct), "{words:?} {path}");
        }
    }
    // A password is set once, and is never kept here.
    let Instance { guest, .. } = &instances[0];
    gets(guest, PASSWORD, 200, "").expect("none yet");
    let words = ["-dsecret", &format!("http://{METADATA}{PASSWORD}")];
    assert_eq!(guest.curl(&words, PATIENCE).expect("an answer").status, 200);
    eventually(NOTICE, || gets(guest, PASSWORD, 200, "secret")).expect("Nova has forgotten the old one");
    let [through, direct] = both(&node, &instances[0], &["-danother"], PASSWORD).expect("answers");
    assert_eq!((through.status, direct.status), (409, 409));
}

#[test]
fn an_instance_that_nova_does_not_know_has_no_documents() {
    let Some(node) = Node::or_skip() else { return };
    let unknown = node.boot_unknown(Identity { address: ADDRESS, ..Identity::of(0) }).expect("a guest");
    let mut of_another_project = node.boot(1).expect("an instance");
    of_another_project.project = "f".repeat(32);
    let _agent = node.agent().expect("an agent");
    for instance in [unknown, of_another_project] {
        node.bind(&instance).expect("bound");
        eventually(NOTICE, || gets(&instance.guest, META_DATA, 404, "")).expect("no meta-data");
        let [through, direct] = both(&node, &instance, &[], META_DATA).expect("answers");
        assert_eq!(through, direct);
    }
}

/// With `--nocapture` it prints how many requests reach Nova.
#[test]
fn cloud_init_finds_its_cloud_and_what_is_asked_ahead_is_what_it_asks() {
    let Some(node) = Node::or_skip() else { return };
    let _agent = node.agent().expect("an agent");
    for (number, release) in [(0, Release::Distribution), (1, Release::Newer)] {
        let Some(cloud_init) = CloudInit::or_skip(release) else { return };
        let instance = node.boot(number).expect("an instance");
        node.bind(&instance).expect("bound");
        let Instance { guest, identity, .. } = &instance;
        guest.enable_ipv6().expect("IPv6");
        let reached = || -> Result<Vec<String>> {
            let all = node.nova.requests()?;
            let own =
                all.iter().filter(|request| request["fields"]["X_INSTANCE_ID"] == *identity.instance_id);
            Ok(own.map(|request| request["path"].as_str().unwrap_or_default().to_owned()).collect())
        };
        eventually(NOTICE, || {
            let count = reached()?.len();
            ensure!(count == 6, "{count} requests");
            Ok(())
        })
        .expect("what is asked ahead");
        let ahead = reached().expect("requests");
        let machine = Machine {
            dmi: [
                ("system-product-name", "OpenStack Nova".into()),
                ("system-uuid", identity.instance_id.clone()),
            ]
            .into(),
            config: json!({"datasource_list": [], "users": ["default"]}),
            ..Machine::default()
        };
        for boot in ["first", "second"] {
            let before = reached().expect("requests").len();
            let crawl = cloud_init.crawl(guest.ns(), "OpenStack", &machine).expect("a crawl");
            assert!(crawl.found, "{crawl:?}");
            assert_eq!((&crawl.instance_id, &crawl.hostname), (&identity.instance_id, &identity.hostname));
            assert_eq!(
                (&crawl.ssh_keys[..], &crawl.user_data[..]),
                (&[identity.ssh_key.clone()][..], identity.user_data.as_bytes())
            );
            assert_eq!((&crawl.vendor_data[..], &*crawl.network_trouble), (&b"#cloud-config\n{}\n"[..], ""));
            for path in &ahead {
                assert!(
                    crawl.requests.iter().any(|asked| asked.is(&format!("GET {path}"))),
                    "{path} is not asked"
                );
            }
            let (asked, new) = (crawl.requests.len(), reached().expect("requests").len() - before);
            eprintln!(
                "cloud-init {}, {boot} boot: {asked} requests, of which {new} reach Nova",
                crawl.version
            );
        }
    }
}
