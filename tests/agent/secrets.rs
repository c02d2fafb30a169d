//! Secrets of a record, a guest or the agent appear in no log, error or `Debug` output, and in no file that other users
//! may read.

use metadata_common::addresses::Connection;
use metadata_common::cookie::CookieKey;
use metadata_common::siphash::SipKey;
use metadata_common::time::Now;
use metadata_content::dialect;
use metadata_content::http::{Headers, Method, Request, RequestTarget};
use metadata_content::identity::{IssuedToken, IssuerResponse};
use metadata_content::mailbox::{EveDocument, Mailbox};
use metadata_content::on_demand::OnDemand;
use metadata_content::record::{Record, RecordLimits};
use metadata_content::sink::Outbox;
use metadata_content::store::{Interner, Store, VmState};
use metadata_datapath::stack::{ConnectionAction, Exchange as _, Service as _, StackConfig};
use metadata_signer::Algorithm;
use metadata_steer::SteerConfig;
use metadata_user::config::Config;
use metadata_user::service::MetadataService;
use metadata_user::verbs::check;
use metadata_user::verbs::explain::{self, ExplainRequest};
use serde_json::{Value, json};
use std::fmt::Debug;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use support::agent::{Agent, PortArgument, arguments, binary};
use support::eventually;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::privilege::{Jail, NOBODY, User};
use support::privileged;
use support::record::{Identity, replace};

/// The beginning of every secret in these tests.
const CANARY: &str = "CANARY";
const PATIENCE: Duration = Duration::from_secs(10);
const SOURCE: &str = "http://169.254.169.254";

fn canary(name: &str) -> String {
    format!("{CANARY}-{name}")
}

/// True if `text` contains a canary: in plain, in base64 at any offset, or as bytes in decimal or hex.
fn shows(text: &str) -> bool {
    use base64::Engine as _;
    let packed: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let listed = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte},")).collect::<String>();
    let hex: String = CANARY.bytes().map(|byte| format!("{byte:02x}")).collect();
    let encoded = (0..3).map(|offset| {
        let bytes = [&b"   "[..offset], CANARY.as_bytes()].concat();
        let text = base64::engine::general_purpose::STANDARD_NO_PAD.encode(bytes);
        // The first and last characters depend on the bytes beside the canary.
        text[(offset * 4).div_ceil(3)..text.len() - 1].to_owned()
    });
    let list = listed(CANARY.as_bytes());
    let plain = [CANARY.to_owned(), list.trim_end_matches(',').to_owned(), hex];
    plain.into_iter().chain(encoded).any(|form| packed.to_lowercase().contains(&form.to_lowercase()))
}

#[test]
fn no_identity_token_or_key_is_in_debug_output() {
    let token = IssuedToken { text: canary("token").into(), issued: 0, expires: 1 };
    assert!(!shows(&format!("{token:?} {:?}", IssuerResponse::Token(token.clone()))));
    for algorithm in [Algorithm::Es256, Algorithm::EdDsa] {
        let pem = metadata_signer::SigningKey::generate(algorithm).expect("a key");
        let key = metadata_signer::SigningKey::parse(algorithm, &pem).expect("the key");
        let secret: Vec<&str> = pem.lines().filter(|line| !line.starts_with('-')).collect();
        let shown = format!("{key:?}");
        assert!(!secret.is_empty() && secret.iter().all(|line| !shown.contains(line)), "{shown}");
    }
}

#[test]
fn a_canary_is_found_in_every_form() {
    use base64::Engine as _;
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    for text in [
        "a CANARY-x".to_owned(),
        format!("{:?}", b"a CANARY"),
        format!("{:#?}", b"a CANARY"),
        encode("CANARY-x"),
        encode("aCANARY-x"),
        encode("aaCANARY-x"),
    ] {
        assert!(shows(&text), "{text}");
    }
    assert!(!shows("nothing of the kind"));
}

/// Puts a canary into every secret member of a record.
fn put_canaries(record: &mut Value) {
    record["admin"] = json!({ "user": "alice", "password": canary("admin-password") });
    record["user_data"] = json!({ "text": format!("#cloud-config\n# {}\n", canary("user-data")) });
    record["vendor_data"] = json!({ "text": format!("#cloud-config\n# {}\n", canary("vendor-data")) });
    record["metadata"] = json!({ "startup-script": canary("startup-script") });
    record["credentials"] = json!({
        "iam": {
            "role": "app", "access_key_id": "AKID", "secret_access_key": canary("secret-key"),
            "session_token": canary("session-token"), "expires": "2030-01-01T00:00:00Z",
        },
        "service_account": {
            "name": "web", "email": "web@p1.local", "scopes": ["cloud-platform"],
            "token": { "text": canary("account-token"), "expires": "2030-01-01T00:00:00Z" },
        },
    });
}

fn record() -> Value {
    let mut record = serde_json::from_str(&Identity::of(0).record(1)).expect("a record");
    put_canaries(&mut record);
    record
}

fn assert_hides(what: &str, value: &dyn Debug) {
    for text in [format!("{value:?}"), format!("{value:#?}")] {
        assert!(!shows(&text), "{what}: {text}");
    }
}

const CONNECTION: Connection = Connection {
    slot: 0,
    local: (std::net::IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 169, 254)), 80),
    remote: (std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)), 40_000),
};
const NOW: Now = Now { mono: Duration::ZERO, unix_seconds: 1_700_000_000 };

#[test]
fn no_debug_output_shows_a_secret_of_a_record_or_guest() {
    let (record, _) = Record::parse("vm.json", &record().to_string()).expect("a record");
    assert_hides("record", &record);
    let mailbox = Arc::new(Mailbox::new(record.vm.uuid.as_str(), &Outbox::detached()));
    mailbox.post_password(canary("posted").as_bytes()).expect("posted");
    mailbox.set_attribute("guest", "key", canary("attribute").as_bytes()).expect("set");
    mailbox.store_document(EveDocument::Kubeconfig, canary("document").as_bytes()).expect("stored");
    mailbox.note_record("vm", Some(&canary("admin-password")));
    assert_hides("mailbox", &mailbox);
    let vm = VmState { mailbox, ..VmState::alone(record.vm.uuid.as_str()) };
    assert_hides("VM", &vm);
    assert_hides("keyring", &vm.keyring);
    let mut interner = Interner::new();
    let responses = Arc::new(dialect::render(&record, &mut interner, vm));
    assert_hides("interner", &interner);
    assert_hides("responses", &responses);

    let store = Arc::new(Store::new(1));
    store.publish(0, Arc::clone(&responses)).expect("a slot");
    assert_hides("store", &store);
    let target = RequestTarget { path: "/latest/user-data", query: "" };
    let value = canary("field");
    let fields = [httparse::Header { name: "X-Token", value: value.as_bytes() }];
    let body = canary("body");
    let request =
        Request { method: Method::Get, target, headers: Headers::new(&fields), body: body.as_bytes() };
    assert_hides("request", &request);
    assert_hides("answer", &responses.answer(NOW, &CONNECTION, &request, None));
}

#[test]
fn no_debug_output_of_connections_or_settings_shows_a_secret() {
    let (record, _) = Record::parse("vm.json", &record().to_string()).expect("a record");
    let store = Store::new(1);
    let vm = VmState::alone(record.vm.uuid.as_str());
    store.publish(0, Arc::new(dialect::render(&record, &mut Interner::new(), vm))).expect("a slot");
    let mut serve = MetadataService::new(Arc::new(OnDemand::new(store)));
    // An incomplete head, an incomplete body, and a request with a complete answer.
    let asked = [
        format!("GET / HTTP/1.1\r\nHost: x\r\nX-Token: {}", canary("field")),
        format!("POST /v1/phone-home HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{}", canary("body")),
        "GET /latest/user-data HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
    ];
    for bytes in asked {
        let mut talk = serve.open(NOW, CONNECTION);
        talk.receive(NOW, bytes.as_bytes());
        assert_hides(&bytes, &talk);
        assert_hides(&bytes, &talk.next(NOW));
    }
    assert_hides("service", &serve);
    assert_hides("step", &ConnectionAction::SendWithin { bytes: canary("token").into(), hop_limit: 1 });
    // `Debug` would print the key's two numbers in decimal.
    let key = CookieKey([0x4341_4e41_5259, 4_242_424_242]);
    for text in [
        format!("{:?}", StackConfig { cookie_key: key, ..StackConfig::default() }),
        format!("{:?}", SteerConfig { key, request_key: SipKey(key.0), ..SteerConfig::default() }),
        format!("{:?}", Config::default()),
    ] {
        assert!(!text.contains("4242424242") && !text.contains(&0x4341_4e41_5259_u64.to_string()), "{text}");
    }
    let question = ExplainRequest {
        record: "vm.yaml".into(),
        limits: RecordLimits::DEFAULT,
        identity: None,
        method: "GET".into(),
        target: "/".into(),
        fields: vec![canary("field")],
        body: canary("body"),
        to: None,
        port: None,
        source_port: 40_000,
    };
    assert_hides("question", &question);
}

/// Invalid records with a secret at a wrong place or in a wrong form, each with its error.
fn invalid_records() -> Vec<(&'static str, String)> {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut record = record();
        change(&mut record);
        record.to_string()
    };
    let secret = || canary("misplaced");
    vec![
        ("a password in a list", with(&|r| r["admin"]["password"] = json!([secret()]))),
        ("a password in a mapping", with(&|r| r["admin"]["password"] = json!({ secret(): secret() }))),
        ("a password on two lines", with(&|r| r["admin"]["password"] = json!(format!("{}\n2", secret())))),
        ("user-data as text", with(&|r| r["user_data"] = json!(secret()))),
        ("user-data in a list", with(&|r| r["user_data"]["text"] = json!([secret()]))),
        ("user-data that is not base64", with(&|r| r["user_data"] = json!({ "base64": secret() }))),
        ("a seed that is not base64", with(&|r| r["random_seed"] = json!({ "base64": secret() }))),
        ("credentials as text", with(&|r| r["credentials"] = json!(secret()))),
        ("a key as a list", with(&|r| r["credentials"]["iam"]["secret_access_key"] = json!([secret()]))),
        ("a token as text", with(&|r| r["credentials"]["service_account"]["token"] = json!(secret()))),
        ("metadata that is not text", with(&|r| r["metadata"]["script"] = json!([secret()]))),
        ("metadata too long", with(&|r| r["metadata"]["script"] = json!(secret().repeat(100)))),
        ("not closed", format!("schema: vmrecord/1\nadmin: {{password: \"{}\n", secret())),
        ("no mapping", format!("schema: vmrecord/1\nuser_data:\n  text: |\n  {}\n", secret())),
        ("an unknown anchor", format!("schema: vmrecord/1\nadmin: {{password: *{}}}\n", secret())),
        ("a tag", format!("schema: vmrecord/1\nadmin: {{password: !{} x}}\n", secret())),
    ]
}

#[test]
fn no_error_about_a_record_shows_its_secrets() {
    let room = tempfile::tempdir().expect("a directory");
    for (what, text) in invalid_records() {
        let file = room.path().join("vm.yaml");
        fs::write(&file, &text).expect("a record");
        fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("a mode");
        let (mut out, mut complaints) = (Vec::new(), Vec::new());
        check::run(room.path(), &RecordLimits::DEFAULT, "imds", true, &mut out, &mut complaints)
            .expect("a check");
        check::run_json(room.path(), &RecordLimits::DEFAULT, "imds", true, &mut out).expect("a check");
        let said = String::from_utf8_lossy(&[out, complaints].concat()).into_owned();
        assert!(said.contains("vm.yaml") && !shows(&said), "{what}: {said}");
        let question = ExplainRequest {
            record: file,
            limits: RecordLimits::DEFAULT,
            identity: None,
            method: "GET".into(),
            target: "/".into(),
            fields: Vec::new(),
            body: String::new(),
            to: None,
            port: None,
            source_port: 40_000,
        };
        let error = explain::run(&question, false, &mut Vec::new()).expect_err(what);
        assert!(!shows(&format!("{error:#} {error:?}")), "{what}: {error:#}");
    }
}

/// Every file and directory below `directory` that users other than its owner may access.
fn open_files(directory: &Path) -> Vec<String> {
    let mut open = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory").flatten() {
        let found = entry.metadata().expect("metadata");
        if found.mode() & 0o077 != 0 {
            open.push(format!("{} {:o}", entry.path().display(), found.mode() & 0o7777));
        }
        if found.is_dir() {
            open.extend(open_files(&entry.path()));
        }
    }
    open
}

#[privileged::test]
fn an_agent_at_log_level_trace_logs_no_secret_and_keeps_its_files_private() {
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let identity = Identity::of(0);
    let path = identity.path(records.path());
    let mut full = record();
    full["sinks"] = json!({ "phone_home": "unix:/nowhere.sock", "password": "unix:/nowhere.sock" });
    replace(&path, &full.to_string()).expect("a record");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let mut words = arguments(records.path(), &[port]);
    words.extend(["--log".into(), "trace".into()]);
    let agent = Agent::start_binary(&binary().expect("an agent"), host.ns(), words).expect("an agent");
    let ask = |words: &[&str]| guest.curl(words, PATIENCE).expect("an answer");
    let url = |path: &str| format!("{SOURCE}{path}");

    let token =
        ask(&["-X", "PUT", "-H", "X-aws-ec2-metadata-token-ttl-seconds: 60", &url("/latest/api/token")]);
    let token = token.text();
    let held = format!("X-aws-ec2-metadata-token: {token}");
    let mut seen = 0;
    for path in ["/latest/user-data", "/v1/user-data", "/latest/meta-data/iam/security-credentials/app"] {
        seen += usize::from(shows(&ask(&["-H", &held, &url(path)]).text()));
    }
    assert_eq!(seen, 3, "the guest itself must get its secrets");
    let password = ask(&["-H", "DomU_Request: send_my_password", &url(":8080/")]);
    assert!(shows(&password.text()), "the guest itself must get its secrets");
    let forged = format!("X-aws-ec2-metadata-token: {}", canary("forged"));
    ask(&["-H", &forged, &url("/latest/user-data")]);
    ask(&["-H", &format!("Authorization: {}", canary("authorization")), &url("/v1/user-data")]);
    let form = format!("hostname={}", canary("home"));
    ask(&["-d", &form, &url("/v1/phone-home")]);
    let posted = canary("posted");
    ask(&["-d", &posted, &url("/openstack/latest/password")]);
    for (n, (_, text)) in invalid_records().into_iter().enumerate() {
        replace(&records.path().join(format!("invalid-{n}.yaml")), &text).expect("a record");
    }
    eventually(PATIENCE, || {
        let refused = agent.log().matches("refused, so its VM is not served").count();
        anyhow::ensure!(refused >= invalid_records().len(), "{refused} refused");
        Ok(())
    })
    .expect("a refusal of every invalid record");

    let said = agent.log();
    assert!(said.contains("TRACE") || said.contains("DEBUG"), "{said}");
    assert!(!token.is_empty() && !said.contains(&token), "a token is in the log");
    let line = said.lines().find(|line| shows(line));
    assert_eq!(line, None);
    for file in ["environ", "cmdline"] {
        let text = fs::read(format!("/proc/{}/{file}", agent.pid())).expect("readable by root");
        assert!(!shows(&String::from_utf8_lossy(&text)), "{file}");
    }
    drop(agent);
    assert_eq!(open_files(&records.path().join("state")), Vec::<String>::new());
}

#[privileged::test]
fn other_processes_of_the_agents_user_cannot_read_its_memory() {
    let jail = Jail::new().expect("a copy of the agent");
    let host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    chown(records.path(), Some(NOBODY), Some(NOBODY)).expect("an owner");
    let few = ["net_admin", "net_raw", "sys_admin", "ipc_lock"];
    let agent = jail.start(host.ns(), User::Nobody, &few, arguments(records.path(), &[])).expect("an agent");
    // In /proc, the files of a process that cannot be dumped belong to root, anyone who runs it (proc(5)).
    for file in ["mem", "environ", "maps", "fd"] {
        let found = fs::metadata(format!("/proc/{}/{file}", agent.pid())).expect("the file exists");
        assert_eq!(found.uid(), 0, "{file}");
    }
}
