//! Properties that every dialect keeps for any record.

mod records;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_content::dialect;
use metadata_content::http::{Method, Response, StatusCode};
use metadata_content::on_demand::OnDemand;
use metadata_content::record::{DateTree, Dialects, Record, RecordLimits};
use metadata_content::sink::Outbox;
use metadata_content::store::{Host, Interner, Responses, Store, VmState};
use metadata_content::token::Keyring;
use metadata_feed::state::mailboxes::Mailboxes;
use proptest::prelude::*;
use records::{Given, any_record, bare, parse};
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};
use support::question::{Insider, Question, quoted, slashed};
use support::vectors;

/// Number of records per property, unless `PROPTEST_CASES` sets it.
const CASES: u32 = 24;

fn config() -> ProptestConfig {
    let cases = std::env::var_os("PROPTEST_CASES").map_or(CASES, |_| ProptestConfig::default().cases);
    ProptestConfig { cases, ..ProptestConfig::default() }
}

/// All GET requests of clients that the vectors contain.
static KNOWN: LazyLock<Vec<Question>> = LazyLock::new(|| {
    let questions = vectors::all(vectors::ALL).into_iter().map(|v| v.question().expect("a request"));
    questions.filter(|question| question.method == Method::Get).collect()
});

/// A node with VMs that share one key ring.
struct Node {
    keyring: Arc<Keyring>,
    mailboxes: Mailboxes,
    interner: Interner,
}

impl Node {
    fn new() -> Self {
        let mailboxes = Mailboxes::in_memory(Outbox::detached());
        Self { keyring: Arc::new(Keyring::ephemeral()), mailboxes, interner: Interner::new() }
    }

    fn take(&mut self, record: &Record) -> Responses {
        let vm = VmState::of(
            record,
            Arc::clone(&self.keyring),
            self.mailboxes.for_record(metadata_content::source::RecordSource::File, "vm.json", record),
        );
        dialect::render(record, &mut self.interner, vm)
    }
}

fn responses_of(record: &Record) -> Responses {
    Node::new().take(record)
}

/// Requests for all routes, and all known requests of clients, without tokens and with every token.
fn questions(responses: &Responses, insider: &Insider<'_>) -> Vec<Question> {
    let routes = responses.routes().map(|(host, path, _)| insider.question(host, &quoted(path)));
    let known = KNOWN.iter().cloned();
    let keyed = KNOWN.iter().map(|question| Question {
        source_port: question.source_port,
        to: question.to,
        ..insider.question(question.host(), &question.target)
    });
    routes.chain(known).chain(keyed).collect()
}

fn body(response: &Response) -> Vec<u8> {
    response.body().to_bytes().to_vec()
}

fn json_document(insider: &Insider<'_>, target: &str) -> Value {
    let answer = insider.get(Host::Metadata, target);
    assert_eq!(answer.status(), StatusCode(200), "{target}");
    serde_json::from_slice(&body(&answer)).expect("a JSON document")
}

/// True for the only server errors that are allowed: a missing or expired token.
fn has_no_token(question: &Question, answer: &Response) -> bool {
    let google = question.target.contains("service-accounts");
    match answer.status() {
        StatusCode(500) => body(answer).starts_with(br#"{"error":"token_unavailable""#),
        StatusCode(503) => google && answer.field("Retry-After").is_some(),
        _ => false,
    }
}

fn contains(bytes: &[u8], part: &str) -> bool {
    bytes.windows(part.len()).any(|bytes| bytes == part.as_bytes())
}

const EC2: Tree =
    Tree { host: Host::Metadata, root: "/latest/meta-data/", query: "", listing: Listing::Ec2, lists: &[] };
/// The other trees with listings.
const TREES: [Tree; 4] = [
    Tree { host: Host::AliYun, ..EC2 },
    Tree {
        host: Host::Metadata,
        root: "/computeMetadata/v1/",
        query: "?audience=a",
        listing: Listing::Google,
        lists: &[],
    },
    Tree {
        host: Host::Metadata,
        root: "/metadata/v1/",
        query: "",
        listing: Listing::Plain,
        lists: &["tags/"],
    },
    Tree {
        host: Host::Metadata,
        root: "/metadata/instance/",
        query: "?api-version=2021-08-01&format=text",
        listing: Listing::Plain,
        lists: &[],
    },
];
/// The leaves of EC2's tree that have several lines.
const LISTS: [&str; 6] = [
    "local-ipv4s",
    "public-ipv4s",
    "ipv6s",
    "subnet-ipv6-cidr-blocks",
    "vpc-ipv4-cidr-blocks",
    "vpc-ipv6-cidr-blocks",
];

proptest! {
    #![proptest_config(config())]

    /// cloud-init abandons EC2's tree if one listed name is missing, and reads a leaf with a newline as a list.
    #[test]
    fn everything_ec2_lists_exists_and_is_one_line(Given { mut value, .. } in any_record()) {
        value["serve"]["date_tree"] = json!("ec2");
        let responses = responses_of(&parse(value));
        for (name, place, leaf) in EC2.crawl(&Insider::of(&responses))? {
            let text = body(&leaf);
            prop_assert!(!text.ends_with(b"\n"), "{} ends in a newline", place);
            // Clients do not crawl these documents.
            let read = place.contains("/security-credentials/") || place.ends_with("/iam/info");
            let list = read || LISTS.contains(&name.as_str());
            prop_assert!(list || !text.contains(&b'\n'), "{} has a newline", place);
        }
    }

    /// The guest does not notice which dialects were rendered before it asked.
    #[test]
    fn a_dialect_rendered_on_demand_answers_as_one_rendered_in_advance(
        Given { mut value, .. } in any_record(),
        gce_root: bool,
        has_flat_tree: bool,
        seed: u64,
    ) {
        value["serve"]["gce_root"] = json!(gce_root);
        if has_flat_tree {
            value["serve"]["date_tree"] = json!("cloudstack");
        }
        let mut rng = fastrand::Rng::with_seed(seed);
        let maas_path = rng.choice(["/MAAS/metadata", "/MAAS", "/maas", "/latest/maas"]).expect("one of four");
        value["serve"]["maas_path"] = json!(maas_path);
        let record = Arc::new(parse(value));
        let all = responses_of(&record);
        let none = || dialect::render_asked(&record, &mut Interner::new(), all.vm().clone(), Dialects::NONE);
        let on_demand = OnDemand::new(Store::new(1));
        on_demand.store().publish(0, Arc::new(none())).expect("slot 0");
        let insider = Insider::of(&all);
        let mut questions = questions(&all, &insider);
        questions.push(insider.question(Host::Metadata, &format!("{maas_path}/latest/meta-data/instance-id")));
        rng.shuffle(&mut questions);
        for question in questions {
            prop_assert_eq!(question.ask_on_demand(&on_demand), question.ask(&all), "{:?}", question);
        }
    }

    #[test]
    fn everything_listed_exists(given in any_record()) {
        let responses = responses_of(&given.record);
        let insider = Insider::of(&responses);
        for tree in TREES {
            tree.crawl(&insider)?;
        }
        for directory in ["/openstack", "/openstack/latest"] {
            let listing = String::from_utf8(body(&insider.get(Host::Metadata, directory))).expect("text");
            for name in listing.split('\n').filter(|name| !name.is_empty()) {
                let place = format!("{directory}/{name}");
                prop_assert_eq!(insider.get(Host::Metadata, &place).status(), StatusCode(200), "{}", place);
            }
        }
    }

    #[test]
    fn everything_a_flat_tree_lists_exists(Given { mut value, .. } in any_record()) {
        value["serve"]["date_tree"] = json!("cloudstack");
        let responses = responses_of(&parse(value));
        Tree { listing: Listing::Plain, ..EC2 }.crawl(&Insider::of(&responses))?;
    }

    #[test]
    fn extra_slashes_do_not_change_an_answer(given in any_record()) {
        let responses = responses_of(&given.record);
        for question in questions(&responses, &Insider::of(&responses)) {
            let answer = question.ask(&responses);
            for target in slashed(&question.target) {
                let other = Question { target: target.clone(), ..question.clone() }.ask(&responses);
                let same = (other.status(), other.body()) == (answer.status(), answer.body());
                prop_assert!(same, "{} is {:?}, {} is {:?}", question.target, answer, target, other);
            }
        }
    }

    /// Both answers have the same body here. Only the connection omits the body of an answer to HEAD.
    #[test]
    fn head_gets_the_answer_of_get(given in any_record()) {
        let responses = responses_of(&given.record);
        for question in questions(&responses, &Insider::of(&responses)) {
            let answer = question.ask(&responses);
            prop_assert_eq!(question.by(Method::Head).ask(&responses), answer);
        }
    }

    #[test]
    fn every_record_reads_back_from_its_serialized_form(given in any_record()) {
        let kept = given.record.to_json().expect("JSON");
        let limits = RecordLimits { record_bytes: usize::MAX, ..RecordLimits::DEFAULT };
        let (found, _) = Record::parse_within(&limits, "kept.json", &kept).expect("a record");
        prop_assert_eq!(found, given.record);
    }

    #[test]
    fn user_data_arrives_unchanged_in_every_dialect(given in any_record()) {
        let Some(bytes) = given.user_data.filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
        let responses = responses_of(&given.record);
        let insider = Insider::of(&responses);
        for (host, target) in [
            (Host::Metadata, "/v1/user-data"),
            (Host::Metadata, "/openstack/latest/user_data"),
            (Host::Metadata, "/latest/user-data"),
            (Host::Metadata, "/2009-04-04/user-data"),
            (Host::Metadata, "/computeMetadata/v1/instance/attributes/user-data"),
            (Host::Metadata, "/metadata/v1/user-data"),
            (Host::Metadata, "/hetzner/v1/userdata"),
            (Host::Metadata, "/user-data/user-data"),
            (Host::AliYun, "/latest/user-data"),
        ] {
            let answer = insider.get(host, target);
            prop_assert_eq!(answer.status(), StatusCode(200), "{}", target);
            // GCE's attributes are text; other bytes are in base64.
            let encoded = target.ends_with("attributes/user-data") && std::str::from_utf8(&bytes).is_err();
            let found = if encoded { STANDARD.decode(body(&answer)).expect("base64") } else { body(&answer) };
            prop_assert_eq!(&found, &bytes, "{}", target);
        }
        if given.record.credentials.maas.is_none() {
            let maas = insider.get(Host::Metadata, "/MAAS/metadata/2012-03-01/user-data");
            prop_assert_eq!(body(&maas), &bytes[..]);
        }
        let akamai = insider.tokens().iter().find(|(_, field, _)| *field == "Metadata-Token");
        let (_, field, token) = akamai.expect("a token");
        let akamai = Question::get("/v1/user-data").with(field, token.clone()).ask(&responses);
        let azure = "/metadata/instance/compute/userData?api-version=2021-08-01&format=text";
        let azure = insider.get(Host::Metadata, azure);
        let oracle = insider.get(Host::Metadata, "/opc/v2/instance/metadata/user_data");
        for answer in [akamai, azure, oracle] {
            prop_assert_eq!(STANDARD.decode(body(&answer)).expect("base64"), &bytes[..]);
        }
    }

    /// A document holds gzip as a MIME part, which cloud-init unpacks. Other bytes have no text form.
    #[test]
    fn user_data_arrives_in_text_documents(given in any_record()) {
        let Some(bytes) = given.user_data.filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
        let responses = responses_of(&given.record);
        let insider = Insider::of(&responses);
        let cloudcix = STANDARD.decode(body(&insider.get(Host::Metadata, "/v1/userdata"))).expect("base64");
        let member = |target: &str, name: &str| {
            json_document(&insider, target)[name].as_str().expect("text").to_owned()
        };
        for text in [
            member("/metadata/v1.json", "user_data"),
            member("/v1.json", "user-data"),
            member("/api/v1/metadata", "userdata"),
            String::from_utf8(cloudcix).expect("text"),
            String::from_utf8(body(&insider.get(Host::Scaleway, "/user_data/cloud-init"))).expect("text"),
        ] {
            let head = "MIME-Version: 1.0\nContent-Type: application/gzip\n\
                        Content-Transfer-Encoding: base64\n\n";
            let wanted = match std::str::from_utf8(&bytes) {
                Ok(text) => text.to_owned(),
                Err(_) if bytes.starts_with(&[0x1f, 0x8b]) => {
                    format!("{head}{}\n", STANDARD.encode(&bytes))
                }
                Err(_) => String::new(),
            };
            prop_assert_eq!(text, wanted);
        }
    }

    #[test]
    fn vendor_data_arrives_unchanged(given in any_record()) {
        let Some(bytes) = given.vendor_data.filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
        let responses = responses_of(&given.record);
        let insider = Insider::of(&responses);
        for (host, target) in [
            (Host::Metadata, "/v1/vendor-data"),
            (Host::Metadata, "/metadata/v1/vendor-data"),
            (Host::AliYun, "/latest/vendor-data"),
        ] {
            prop_assert_eq!(body(&insider.get(host, target)), &bytes[..], "{}", target);
        }
    }

    #[test]
    fn no_vm_gets_data_of_another(one in any_record(), other in any_record()) {
        let mut marked = one.value;
        for place in ["/vm/name", "/vm/instance_id", "/instance_type"] {
            *marked.pointer_mut(place).expect("a place") = json!("marked-as-mine");
        }
        marked["user_data"] = json!({ "text": "#cloud-config\n# marked-as-mine\n" });
        marked["metadata"] = json!({ "owner": "marked-as-mine" });
        let mine = parse(marked);
        prop_assume!(mine.vm.uuid != other.record.vm.uuid);
        let mut node = Node::new();
        let (mine_served, other_served) = (node.take(&mine), node.take(&other.record));
        let insider = Insider::of(&other_served);
        for question in questions(&other_served, &insider) {
            let answer = question.ask(&other_served);
            for said in [answer.head().to_vec(), body(&answer)] {
                let leaks = contains(&said, "marked-as-mine") || contains(&said, mine.vm.uuid.as_str());
                prop_assert!(!leaks, "{}", question.target);
            }
        }
        prop_assert!(contains(&body(&Question::get("/v1/user-data").ask(&mine_served)), "marked-as-mine"));
    }

    #[test]
    fn a_token_is_valid_only_for_its_vm_and_its_dialect(one in any_record(), other in any_record()) {
        prop_assume!(one.record.vm.uuid != other.record.vm.uuid);
        let mut node = Node::new();
        let vms = [node.take(&one.record), node.take(&other.record)];
        let guarded = |host: Host, field: &str| match (host, field) {
            (_, "Metadata-Token") => Question::get("/v1/instance"),
            (host, _) => Question::get("/latest/meta-data/").at(host),
        };
        let tokens = Insider::of(&vms[0]).tokens().to_vec();
        for (host, field, token) in &tokens {
            let own = guarded(*host, field).with(field, token.clone());
            prop_assert_eq!(own.ask(&vms[0]).status(), StatusCode(200), "{} of its own VM", field);
            let (tree, is_ec2) = (other.record.serve.date_tree, *field == "X-aws-ec2-metadata-token");
            if !is_ec2 || tree == DateTree::Ec2 {
                prop_assert_eq!(own.ask(&vms[1]).status(), StatusCode(401), "{} of another VM", field);
            }
            for (_, _, foreign) in tokens.iter().filter(|(_, other, _)| other != field) {
                let crossed = guarded(*host, field).with(field, foreign.clone());
                prop_assert_eq!(crossed.ask(&vms[0]).status(), StatusCode(401), "{} of another dialect", field);
            }
        }
    }

    #[test]
    fn data_that_one_guest_writes_is_not_readable_by_another(one in any_record(), other in any_record()) {
        prop_assume!(one.record.vm.uuid != other.record.vm.uuid);
        let mut node = Node::new();
        let vms = [node.take(&one.record), node.take(&other.record)];
        let password = Question::get("/openstack/latest/password");
        let posted = password.clone().by(Method::Post).saying("written-by-one").ask(&vms[0]);
        prop_assert_eq!(posted.status(), StatusCode(200));
        prop_assert_eq!(body(&password.ask(&vms[0])), b"written-by-one");
        prop_assert_eq!(body(&password.ask(&vms[1])), b"");
        let attribute = Question::get("/computeMetadata/v1/instance/guest-attributes/a/b");
        let attribute = attribute.with("Metadata-Flavor", "Google");
        let put = attribute.clone().by(Method::Put).saying("written-by-one").ask(&vms[0]);
        prop_assert_eq!(put.status(), StatusCode(200));
        prop_assert_eq!(body(&attribute.ask(&vms[0])), b"written-by-one");
        prop_assert_eq!(attribute.ask(&vms[1]).status(), StatusCode(404));
        for question in questions(&vms[1], &Insider::of(&vms[1])) {
            prop_assert!(!contains(&body(&question.ask(&vms[1])), "written-by-one"), "{}", question.target);
        }
    }

    #[test]
    fn only_a_missing_token_is_a_server_error(given in any_record()) {
        let responses = responses_of(&given.record);
        for question in questions(&responses, &Insider::of(&responses)) {
            let answer = question.ask(&responses);
            let good = answer.status().0 < 500 || has_no_token(&question, &answer);
            prop_assert!(good, "{} is {:?}", question.target, answer);
        }
    }

    #[test]
    fn answers_for_members_a_bare_record_lacks_delay_no_client(record in bare()) {
        let responses = responses_of(&record);
        let insider = Insider::of(&responses);
        for question in questions(&responses, &insider) {
            let answer = question.ask(&responses);
            let good = answer.status().0 < 500 || has_no_token(&question, &answer);
            prop_assert!(good, "{} is {:?}", question.target, answer);
        }
        for (host, target, status, said) in ABSENT {
            let answer = insider.get(host, target);
            prop_assert_eq!(answer.status(), StatusCode(status), "{}", target);
            prop_assert_eq!(body(&answer), said.as_bytes(), "{}", target);
        }
        let scaleway = insider.get(Host::Scaleway, "/user_data/cloud-init");
        prop_assert!(scaleway.closes(), "the service must close, or the client's port stays in use");
        let digital_ocean = json_document(&insider, "/metadata/v1.json");
        for role in ["public", "private"] {
            let interfaces = digital_ocean["interfaces"].get(role);
            prop_assert!(interfaces.is_none(), "{}: an empty list makes the client fail", role);
        }
        let oracle = json_document(&insider, "/opc/v2/instance/");
        prop_assert!(oracle["metadata"].get("user_data").is_none(), "{}", oracle);
        for (target, name) in [
            ("/v1.json", "user-data"),
            ("/v1.json", "vendor-data"),
            ("/api/v1/metadata", "userdata"),
            ("/api/v1/metadata", "vendordata"),
        ] {
            prop_assert_eq!(&json_document(&insider, target)[name], "", "{} of {}", name, target);
        }
        let identity = json_document(&insider, "/latest/dynamic/instance-identity/document");
        prop_assert!(identity["instanceId"].is_string(), "{}", identity);
    }
}

/// The answers for members that a bare record lacks: host, target, status and body.
const ABSENT: [(Host, &str, u16, &str); 22] = [
    (Host::Metadata, "/v1/user-data", 204, ""),
    (Host::Metadata, "/v1/vendor-data", 204, ""),
    (Host::Metadata, "/v1/network-config", 204, ""),
    (Host::Metadata, "/openstack/latest/user_data", 404, "Not Found\n"),
    (Host::Metadata, "/openstack/latest/vendor_data.json", 200, "{}"),
    (Host::Metadata, "/openstack/latest/vendor_data2.json", 200, "{}"),
    (Host::Metadata, "/openstack/latest/network_data.json", 404, "Not Found\n"),
    (Host::Metadata, "/latest/user-data", 404, "Not Found\n"),
    (Host::Metadata, "/latest/meta-data/public-keys", 404, "Not Found\n"),
    (Host::AliYun, "/latest/user-data", 200, ""),
    (Host::AliYun, "/latest/vendor-data", 200, ""),
    (Host::Metadata, "/computeMetadata/v1/instance/attributes/?recursive=true", 200, "{}"),
    (Host::Metadata, "/computeMetadata/v1/project/attributes/?recursive=true", 200, "{}"),
    (Host::Metadata, "/metadata/instance/compute/userData?api-version=2021-08-01&format=text", 200, ""),
    (Host::Metadata, "/hetzner/v1/userdata", 204, ""),
    (Host::Metadata, "/hetzner/v1/metadata/private-networks", 200, "[]\n"),
    (Host::Scaleway, "/user_data/cloud-init", 404, "Not Found\n"),
    (Host::Scaleway, "/vendor_data/cloud-init", 404, "Not Found\n"),
    (Host::Metadata, "/v1/userdata", 200, ""),
    (Host::Metadata, "/user-data/user-data", 404, "Not Found\n"),
    (Host::Metadata, "/MAAS/metadata/2012-03-01/user-data", 200, ""),
    (Host::Metadata, "/MAAS/metadata/2012-03-01/meta-data/vendor-data", 200, ""),
];

// A client that reads every name that the listings of a tree contain.

/// A depth that no tree reaches.
const DEEPEST: usize = 12;

/// The format of a tree's listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listing {
    /// EC2's format: names joined by newlines; `0=name` is a key below `0`.
    Ec2,
    /// GCE's format: one line per name, each ending in a newline.
    Google,
    /// Names joined by newlines, without a newline at the end.
    Plain,
}

/// A tree to be crawled.
#[derive(Clone, Copy, Debug)]
struct Tree {
    host: Host,
    /// Path of the root, with a slash at its end.
    root: &'static str,
    /// Query that every request needs.
    query: &'static str,
    listing: Listing,
    /// Names that end in a slash although they are lists of values.
    lists: &'static [&'static str],
}

/// A leaf: its name, its path and its answer.
type Leaf = (String, String, Response);

impl Tree {
    /// Reads every listed name, starting at the root; each must exist.
    fn crawl(&self, insider: &Insider<'_>) -> Result<Vec<Leaf>, TestCaseError> {
        let mut leaves = Vec::new();
        self.directory(insider, self.root, 0, &mut leaves)?;
        Ok(leaves)
    }

    fn directory(
        &self,
        insider: &Insider<'_>,
        path: &str,
        depth: usize,
        leaves: &mut Vec<Leaf>,
    ) -> Result<(), TestCaseError> {
        prop_assert!(depth < DEEPEST, "{} is too deep", path);
        let listing = insider.get(self.host, &format!("{path}{}", self.query));
        prop_assert_eq!(listing.status(), StatusCode(200), "{}", path);
        let text = String::from_utf8(listing.body().to_bytes().to_vec()).expect("a listing is text");
        for name in self.names(path, &text)? {
            let quoted = quoted(&name);
            if self.lists.contains(&name.as_str()) {
                let list = insider.get(self.host, &format!("{path}{quoted}{}", self.query));
                prop_assert_eq!(list.status(), StatusCode(200), "{}{}", path, name);
                continue;
            }
            if name.ends_with('/') {
                self.directory(insider, &format!("{path}{quoted}"), depth + 1, leaves)?;
                continue;
            }
            let below = match name.split_once('=') {
                Some((number, _)) if self.listing == Listing::Ec2 && number.parse::<u32>().is_ok() => {
                    format!("{number}/openssh-key")
                }
                _ => quoted,
            };
            let place = format!("{path}{below}");
            let leaf = insider.get(self.host, &format!("{place}{}", self.query));
            // The answer for an expired token asks the client to try again.
            let again = place.contains("/service-accounts/") && leaf.status() == StatusCode(503);
            prop_assert!(leaf.status() == StatusCode(200) || again, "{} is {:?}", place, leaf.status());
            leaves.push((name, place, leaf));
        }
        Ok(())
    }

    fn names(&self, path: &str, text: &str) -> Result<Vec<String>, TestCaseError> {
        let text = match self.listing {
            Listing::Google if text.is_empty() => text,
            Listing::Google => {
                let lines = text.strip_suffix('\n');
                prop_assert!(lines.is_some(), "{} ends without a newline: {:?}", path, text);
                lines.expect("it was just seen")
            }
            Listing::Ec2 | Listing::Plain => text,
        };
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<String> = text.split('\n').map(str::to_owned).collect();
        for (n, name) in names.iter().enumerate() {
            // Clients strip white space around a name, and request a key by its number only.
            let key = self.listing == Listing::Ec2 && name.contains('=');
            prop_assert!(
                !name.is_empty() && (key || name.trim() == name),
                "{:?} is in {} ({:?})",
                name,
                path,
                text
            );
            prop_assert!(!names[..n].contains(name), "{:?} is twice in {}", name, path);
        }
        Ok(names)
    }
}
