//! A VM proves to others who it is: tokens from its guest verify against the node's published keys by a library that
//! knows nothing else, and no key leaves the signer.

mod scene;
mod verifiers;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_common::addresses::ALIYUN;
use scene::{AUDIENCE, Authority, ISSUER, LIFETIME, PATIENCE, Scene, in_memory, make_key, openssl};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::agent::METRICS;
use support::apiserver::{ApiServer, Manner};
use support::eventually;
use support::exposition::sum;
use support::guest::{METADATA, NIC};
use support::inside::Libraries;
use support::{agent, exposition, privileged, process};
use verifiers::{AUDIENCES, Consul, Program, REFUSED, secret};

/// A time far enough in the past that a key signs at once.
const OLD: &str = "20260101T000000Z.pem";
/// A later time, also in the past.
const NEWER: &str = "20260201T000000Z.pem";

#[test]
fn a_guests_token_verifies_against_the_published_keys_in_every_algorithm() {
    let Some(libraries) = Libraries::or_skip() else { return };
    for algorithm in ["ES256", "EdDSA", "RS256"] {
        let scene = Scene::new();
        make_key(&scene.keys().join(OLD), algorithm);
        let agent = scene.agent(&format!("algorithm: {algorithm}, trust_domain: lab.example"), &[]);
        let tokens = [scene.token(0, AUDIENCE), scene.token(1, AUDIENCE)];
        let asked = [(&tokens[0], AUDIENCE), (&tokens[1], AUDIENCE), (&tokens[0], "another")];
        let found = scene.verify(libraries, &agent, &asked);
        for (n, guest) in scene.guests().iter().enumerate() {
            let identity = guest.identity();
            let subject = format!("spiffe://lab.example/vm/{}", identity.instance_id);
            assert_eq!(found[n]["sub"], json!(subject), "{algorithm}: {}", found[n]);
            let vm = &found[n]["vm"];
            assert_eq!((&vm["uuid"], &vm["name"]), (&json!(identity.instance_id), &json!(identity.hostname)));
            assert_eq!(vm["nic"], json!({"id": "n0", "mac": identity.mac.to_string()}));
            let seconds = |claim: &str| found[n][claim].as_u64().expect("a time");
            assert_eq!(seconds("exp") - seconds("iat"), LIFETIME);
        }
        assert_eq!(found[2], json!("InvalidAudienceError"));
        let (status, text) = agent.ask("/.well-known/openid-configuration").expect("the issuer's metadata");
        let document: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((status, &document["issuer"]), (200, &json!(ISSUER)));
        assert_eq!(document["id_token_signing_alg_values_supported"], json!([algorithm]));
    }
}

#[privileged::test]
fn a_request_without_field_or_audience_or_through_a_proxy_gets_no_token() {
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.agent("algorithm: ES256", &[]);
    let field = ["-H", "Metadata: true"];
    let proxied = ["-H", "Metadata: true", "-H", "X-Forwarded-For: 10.0.0.1"];
    let cases: [(&[&str], &str, u16); 5] = [
        (&field, "?audience=vault", 200),
        (&field, "", 400),
        (&field, "?audience=a&audience=b", 400),
        (&[], "?audience=vault", 400),
        (&proxied, "?audience=vault", 403),
    ];
    for (words, query, status) in cases {
        assert_eq!(scene.ask(0, words, query).0, status, "{words:?} {query}");
    }
    scene.change_record(1, |record| record["identity"] = json!({"audiences": ["vault"]}));
    let changed = eventually(PATIENCE, || {
        let (status, body) = scene.ask(1, &field, "?audience=other");
        anyhow::ensure!(status == 403, "{status}: {body}");
        Ok(())
    });
    changed.expect("the record lists one audience");
    assert_eq!(scene.ask(1, &field, "?audience=vault").0, 200);
    drop(agent);
}

#[test]
fn tokens_of_a_replaced_key_verify_to_their_end_and_not_after() {
    let Some(libraries) = Libraries::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.agent("algorithm: ES256", &[]);
    let begun = Instant::now();
    let before = scene.token(0, "before");
    make_key(&scene.keys().join(NEWER), "ES256");
    eventually(PATIENCE, || {
        let keys = scene.published(&agent);
        anyhow::ensure!(keys["keys"].as_array().is_some_and(|keys| keys.len() == 2), "{keys}");
        Ok(())
    })
    .expect("both keys are published");
    let after = scene.token(0, "after");
    let asked = [(&before, "before"), (&after, "after")];
    let found = scene.verify(libraries, &agent, &asked);
    let is_early = begun.elapsed() < Duration::from_secs(LIFETIME);
    if is_early {
        assert!(found[0].is_object() && found[1].is_object(), "{found:?}");
    }
    let kid = |token: &str| scene::header(token)["kid"].clone();
    assert_ne!(kid(&before), kid(&after), "the new key signs");
    std::thread::sleep(Duration::from_secs(LIFETIME + 1).saturating_sub(begun.elapsed()));
    let found = scene.verify(libraries, &agent, &asked);
    assert_eq!(found[0], json!("ExpiredSignatureError"));
    fs::remove_file(scene.keys().join(OLD)).expect("removed");
    eventually(PATIENCE, || {
        let found = scene.verify(libraries, &agent, &asked);
        anyhow::ensure!(found[0] == json!("KeyError"), "{found:?}");
        Ok(())
    })
    .expect("a removed key is no longer published");
}

#[privileged::test]
fn without_its_signer_the_agent_serves_all_but_tokens_and_says_so() {
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.agent("algorithm: ES256", &[]);
    let up = |agent: &agent::Agent<'_>| {
        let (_, text) = agent.ask("/metrics")?;
        sum(&exposition::read(&text)?, "xdp_imds_identity_signer_up", &[])
    };
    assert_eq!(up(&agent).expect("a gauge"), 1.0);
    process::signal(scene.signer(&agent), libc::SIGKILL).expect("a signal");
    eventually(PATIENCE, || {
        anyhow::ensure!(up(&agent)? == 0.0, "the signer counts as up");
        Ok(())
    })
    .expect("the metrics say so");
    assert!(agent.eventually_logs("the signer of identity tokens has ended"), "{}", agent.log());
    let (status, body) = scene.ask(0, &["-i", "-H", "Metadata: true"], "?audience=vault");
    assert_eq!(status, 503, "{body}");
    assert!(body.to_lowercase().contains("retry-after: 1"), "{body}");
    scene.guests()[0].fetch_own("/v1/user-data", PATIENCE).expect("its user-data");
    assert!(scene.status().contains("the signer of identity tokens has ended"), "{}", scene.status());
}

#[privileged::test]
fn an_agent_without_a_key_does_not_start_and_names_the_remedy() {
    let scene = Scene::new();
    let error = scene.try_agent("algorithm: ES256", &[]).expect_err("no key").to_string();
    assert!(
        error.contains("for ES256") && error.contains("make one with `xdp-imds identity key "),
        "{error}"
    );
}

#[privileged::test]
fn no_key_is_in_the_agents_memory_log_audit_or_answers() {
    let scene = Scene::new();
    let secret = make_key(&scene.keys().join(OLD), "EdDSA");
    let agent = scene.agent("algorithm: EdDSA", &["--log", "trace", "--audit", &scene.audit()]);
    let token = scene.token(0, AUDIENCE);
    let published = scene.published(&agent);
    let kid = published["keys"][0]["kid"].as_str().expect("a kid").to_owned();
    let found = in_memory(agent.pid(), &[kid.as_bytes(), secret.text.as_bytes(), &secret.bytes]);
    assert_eq!(found, [true, false, false], "the search finds a public value and no private one");

    let audit = eventually(PATIENCE, || {
        let audit = fs::read_to_string(scene.audit())?;
        anyhow::ensure!(audit.contains("\"subject\""), "{audit}");
        Ok(audit)
    })
    .expect("an audit line for the token");
    let line = audit.lines().find(|line| line.contains("\"subject\"")).expect("a line");
    let line: Value = serde_json::from_str(line).expect("JSON");
    assert_eq!((&line["audience"], &line["key"]), (&json!(AUDIENCE), &json!(kid)));
    let (_, metrics) = agent.ask("/metrics").expect("metrics");
    let signature = token.rsplit('.').next().expect("a signature");
    for (name, text) in
        [("log", agent.log()), ("audit", audit), ("metrics", metrics), ("keys", published.to_string())]
    {
        assert!(!text.is_empty() && !text.contains(&secret.text), "{name}: {text}");
        assert!(!text.contains(signature), "the {name} has a token");
    }
}

// Documents that the operator's certificate signs, verified by OpenSSL as EC2 and Azure tell their customers to.

const EC2: &str = "/latest/dynamic/instance-identity";
const ATTESTED: &str = "/metadata/attested/document?api-version=2020-09-01";

fn scene() -> Scene {
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    scene
}

fn fetch(scene: &Scene, guest: usize, words: &[&str], path: &str) -> (u16, String) {
    let url = format!("http://{METADATA}{path}");
    let words = [words, &[url.as_str()]].concat();
    let fetched = scene.guests()[guest].curl(&words, PATIENCE).expect("an answer");
    (fetched.status, fetched.text())
}

fn text(scene: &Scene, guest: usize, path: &str) -> String {
    let (status, text) = fetch(scene, guest, &[], path);
    assert_eq!(status, 200, "{path}: {text}");
    text
}

/// Verifies a signature of EC2's document as AWS documents it.
fn verify_signature(authority: &Authority, document: &str, signature: &str) -> bool {
    let write = |name: &str, bytes: &[u8]| fs::write(authority.path().join(name), bytes).expect("written");
    write("document", document.as_bytes());
    write("signature", &STANDARD.decode(signature.replace('\n', "")).expect("base64"));
    let public = openssl(authority.path(), &["x509", "-in", "node.pem", "-pubkey", "-noout"]).stdout;
    write("public.pem", &public);
    let words = ["dgst", "-sha256", "-verify", "public.pem", "-signature", "signature", "document"];
    openssl(authority.path(), &words).status.success()
}

/// Verifies PKCS#7 against the authority's root; returns what is signed.
fn verify_pkcs7(authority: &Authority, base64: &str) -> Option<String> {
    let pem = format!("-----BEGIN PKCS7-----\n{}\n-----END PKCS7-----\n", base64.trim_end());
    fs::write(authority.path().join("signed.p7"), pem).expect("written");
    // AWS's own words, which leave the certificate's issuer unchecked, then with the operator's root.
    let of_aws = "smime -verify -in signed.p7 -inform PEM -certfile node.pem -noverify";
    let strict = "cms -verify -in signed.p7 -inform PEM -CAfile root.pem -purpose any";
    let found =
        [of_aws, strict].map(|words| openssl(authority.path(), &words.split(' ').collect::<Vec<_>>()));
    let texts = found.map(|output| output.status.success().then_some(output.stdout));
    assert_eq!(texts[0], texts[1], "both commands find the same");
    texts[1].clone().map(|text| String::from_utf8(text).expect("text"))
}

#[privileged::test]
fn ec2s_signed_documents_verify_and_name_the_vm_that_asked() {
    let (scene, authority) = (scene(), Authority::new(30));
    let _agent = scene.agent(&authority.field(), &[]);
    for (n, guest) in scene.guests().iter().enumerate() {
        let document = text(&scene, n, &format!("{EC2}/document"));
        let fields: Value = serde_json::from_str(&document).expect("JSON");
        let served = text(&scene, n, "/latest/meta-data/instance-id");
        assert_eq!(fields["instanceId"], json!(served), "{}", guest.identity().hostname);
        assert!(verify_signature(&authority, &document, &text(&scene, n, &format!("{EC2}/signature"))));
        for name in ["pkcs7", "rsa2048"] {
            let signed = text(&scene, n, &format!("{EC2}/{name}"));
            assert_eq!(verify_pkcs7(&authority, &signed).as_deref(), Some(document.as_str()), "{name}");
        }
    }
    let (of_another, own) =
        (text(&scene, 1, &format!("{EC2}/signature")), text(&scene, 0, &format!("{EC2}/document")));
    assert!(!verify_signature(&authority, &own, &of_another), "the signature of another VM");
}

#[privileged::test]
fn azures_attested_document_verifies_with_the_guests_nonce() {
    let (scene, authority) = (scene(), Authority::new(30));
    let _agent = scene.agent(&authority.field(), &[]);
    let (status, answer) =
        fetch(&scene, 0, &["-H", "Metadata: true"], &format!("{ATTESTED}&nonce=1234567890"));
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    let signed =
        verify_pkcs7(&authority, answer["signature"].as_str().expect("a signature")).expect("a statement");
    let statement: Value = serde_json::from_str(&signed).expect("JSON");
    let id = &scene.guests()[0].identity().instance_id;
    assert_eq!((&statement["nonce"], &statement["vmId"]), (&json!("1234567890"), &json!(id)));
    assert_eq!(fetch(&scene, 0, &[], ATTESTED).0, 400, "without the field");
    let proxied = ["-H", "Metadata: true", "-H", "X-Forwarded-For: 10.0.0.1"];
    assert_ne!(fetch(&scene, 0, &proxied, ATTESTED).0, 200, "through a proxy");
}

#[privileged::test]
fn aliyuns_detached_signature_verifies_with_the_document_and_the_audience() {
    let (scene, authority) = (scene(), Authority::new(30));
    let _agent = scene.agent(&authority.field(), &[]);
    let guest = &scene.guests()[0];
    guest.ns().ip(&format!("route add {ALIYUN} dev {NIC} scope link")).expect("a route");
    let get = |path: &str| {
        let url = format!("http://{ALIYUN}/latest/dynamic/instance-identity/{path}");
        let fetched = guest.curl(&[url.as_str()], PATIENCE).expect("an answer");
        assert_eq!(fetched.status, 200, "{path}: {}", fetched.text());
        fetched.text()
    };
    let document = get("document");
    let with_audience = document.replacen('}', ",\"audience\":\"vault\"}", 1);
    for (query, signed) in [("", &document), ("?audience=vault", &with_audience)] {
        let pem = format!("-----BEGIN PKCS7-----\n{}\n-----END PKCS7-----\n", get(&format!("pkcs7{query}")));
        fs::write(authority.path().join("signed.p7"), pem).expect("written");
        for (content, verifies) in [(&document, query.is_empty()), (signed, true)] {
            fs::write(authority.path().join("content"), content).expect("written");
            let words =
                "smime -verify -in signed.p7 -inform PEM -content content -certfile node.pem -noverify";
            let output = openssl(authority.path(), &words.split(' ').collect::<Vec<_>>());
            assert_eq!(output.status.success(), verifies, "{query}: {content}");
        }
    }
}

#[privileged::test]
fn a_replaced_certificate_signs_without_a_restart() {
    let (scene, authority) = (scene(), Authority::new(5));
    let _agent = scene.agent(&authority.field(), &[]);
    assert!(scene.status().contains("the certificate for signed documents expires in"), "{}", scene.status());
    let document = text(&scene, 0, &format!("{EC2}/document"));
    assert!(verify_signature(&authority, &document, &text(&scene, 0, &format!("{EC2}/signature"))));
    authority.issue(90);
    eventually(PATIENCE, || {
        let status = scene.status();
        anyhow::ensure!(!status.contains("the certificate for signed documents expires in"), "{status}");
        Ok(())
    })
    .expect("the new certificate is in use");
    // Another VM, because the first has a document that is still fresh.
    let document = text(&scene, 1, &format!("{EC2}/document"));
    assert!(verify_signature(&authority, &document, &text(&scene, 1, &format!("{EC2}/signature"))));
}

#[privileged::test]
fn without_a_certificate_no_document_is_listed_or_served() {
    let scene = scene();
    let _agent = scene.agent("algorithm: ES256", &[]);
    let listed = text(&scene, 0, &format!("{EC2}/"));
    assert!(
        listed.contains("document") && !listed.contains("pkcs7") && !listed.contains("signature"),
        "{listed}"
    );
    assert_eq!(fetch(&scene, 0, &[], &format!("{EC2}/pkcs7")).0, 404);
}

#[privileged::test]
fn an_agent_with_the_key_of_another_certificate_does_not_start_and_says_why() {
    let (scene, authority, other) = (scene(), Authority::new(30), Authority::new(30));
    let ([chain, _], [_, key]) = (authority.files(), other.files());
    let field = format!("certificate: {{chain: '{}', key: '{}'}}", chain.display(), key.display());
    let error = scene.try_agent(&field, &[]).expect_err("two that do not belong together").to_string();
    assert!(error.contains("to be that of the RSA key in"), "{error}");
}

#[privileged::test]
fn the_certificates_key_is_in_the_signer_alone_and_each_document_in_the_audit_log() {
    let (scene, authority) = (scene(), Authority::new(30));
    let agent = scene.agent(&authority.field(), &["--log", "trace", "--audit", &scene.audit()]);
    let signature = text(&scene, 0, &format!("{EC2}/signature"));
    let [_, key] = authority.files();
    let pem = fs::read_to_string(key).expect("a key");
    let body: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
    let bytes = STANDARD.decode(body).expect("base64");
    // The last bytes of PKCS#8 are a private number; those of the chain's PEM file are public.
    let private = &bytes[bytes.len() - 32..];
    let line = eventually(PATIENCE, || {
        let audit = fs::read_to_string(scene.audit())?;
        let line = audit.lines().find(|line| line.contains("\"signed\":\"signature\""));
        anyhow::ensure!(!audit.contains(&signature), "the audit log has a signature");
        line.map(str::to_owned).ok_or_else(|| anyhow::anyhow!("{audit}"))
    })
    .expect("an audit line for the document");
    let line: Value = serde_json::from_str(&line).expect("JSON");
    let identity = scene.guests()[0].identity();
    assert_eq!(line["vm"], json!(identity.instance_id));
    assert_eq!((&line["token"], &line["audience"]), (&Value::Null, &Value::Null));
    let thumbprint = line["key"].as_str().expect("a thumbprint");
    let found = in_memory(agent.pid(), &[thumbprint.as_bytes(), private]);
    assert_eq!(found, [true, false], "the search finds a public value and no private one");
    assert!(!agent.log().contains(&signature), "the log has a signature");
}

// `xdp-imds identity publish` writes what verifiers fetch, as files and as a ConfigMap.

fn publish(config: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    command.args(["identity", "publish", "--config"]).arg(config).args(words).output().expect("the verb runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&*output.stdout, &*output.stderr].concat()).into_owned()
}

/// Creates a directory of two keys, and a configuration that names it.
fn keys() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let keys = directory.path().join("keys");
    fs::create_dir(&keys).expect("a directory");
    for name in [OLD, NEWER] {
        make_key(&keys.join(name), "ES256");
    }
    let config = format!("identity: {{issuer: '{ISSUER}', keys: '{}'}}\n", keys.display());
    fs::write(directory.path().join("config.yaml"), config).expect("written");
    directory
}

#[test]
fn published_files_can_be_read_by_a_web_server_whatever_the_umask_of_their_writer() {
    let directory = keys();
    let out = directory.path().display().to_string();
    for umask in ["077", "022", "000"] {
        let mut command = Command::new("sh");
        command.args(["-c", "umask \"$1\" && shift && exec \"$@\"", "sh", umask]);
        command.arg(agent::binary().expect("the agent is built"));
        command.args(["identity", "publish", "--out", &out, "--config"]);
        let output = command.arg(directory.path().join("config.yaml")).output().expect("the verb runs");
        assert!(output.status.success(), "{umask}: {}", said(&output));
        for name in ["openid-configuration", "jwks.json"] {
            let metadata = fs::metadata(directory.path().join(name)).expect("a file");
            assert_eq!(metadata.permissions().mode() & 0o777, 0o644, "{umask}: {name}");
        }
    }
}

#[test]
fn metadata_and_keys_are_published_as_files() {
    let directory = keys();
    let config = directory.path().join("config.yaml");
    let out = directory.path().display().to_string();
    let output = publish(&config, &["--out", &out]);
    assert!(output.status.success(), "{}", said(&output));
    let read = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(directory.path().join(name)).expect("a file")).expect("JSON")
    };
    let (metadata, keys) = (read("openid-configuration"), read("jwks.json"));
    assert_eq!(metadata["issuer"], json!(ISSUER));
    assert_eq!(metadata["jwks_uri"], json!(format!("{ISSUER}/.well-known/jwks.json")));
    let keys = keys["keys"].as_array().expect("a list");
    assert!(keys.len() == 2 && keys.iter().all(|key| key.get("d").is_none()), "{keys:?}");
    fs::remove_dir_all(directory.path().join("keys")).expect("removed");
    fs::create_dir(directory.path().join("keys")).expect("a directory");
    let refused = publish(&config, &["--out", &out]);
    let text = said(&refused);
    assert!(!refused.status.success() && text.contains("nothing is published: expected a key"), "{text}");
    assert_eq!(read("jwks.json")["keys"].as_array().map(Vec::len), Some(2), "the last set stays");
}

#[test]
fn a_config_map_is_applied_or_the_missing_permission_named() {
    let (directory, server) = (keys(), ApiServer::start().expect("a server"));
    let config = directory.path().join("config.yaml");
    let kubeconfig = directory.path().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig).expect("a kubeconfig");
    let kubeconfig = kubeconfig.display().to_string();
    let words = ["--config-map", "ns/keys", "--kubeconfig", &kubeconfig];
    let output = publish(&config, &words);
    assert!(output.status.success(), "{}", said(&output));
    let map = server.config_map("ns/keys").expect("a ConfigMap");
    let keys: Value = serde_json::from_str(map["data"]["jwks.json"].as_str().expect("a text")).expect("JSON");
    assert_eq!(keys["keys"].as_array().map(Vec::len), Some(2), "{map}");
    assert!(map["data"]["openid-configuration"].as_str().is_some_and(|text| text.contains(ISSUER)), "{map}");
    server.behave(Manner::Forbidding);
    let refused = publish(&config, &words);
    assert!(!refused.status.success() && said(&refused).contains("may `patch` it"), "{}", said(&refused));
}

#[privileged::test]
fn keys_are_fetched_from_agents_by_those_who_have_no_private_key() {
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.agent("algorithm: ES256", &[]);
    let directory = keys();
    let out = directory.path().display().to_string();
    let url = format!("http://{METRICS}/.well-known/jwks.json");
    let output =
        scene.node().run_in(|| publish(&directory.path().join("config.yaml"), &["--out", &out, &url]));
    assert!(output.status.success(), "{}", said(&output));
    let published = fs::read_to_string(directory.path().join("jwks.json")).expect("a file");
    let published: Value = serde_json::from_str(&published).expect("JSON");
    assert_eq!(published, scene.published(&agent));
}

// VMs log in to Consul by their tokens alone, without a password.

#[test]
fn a_guest_logs_in_to_consul_and_reads_only_what_its_vm_may() {
    let Some(program) = Program::or_skip() else { return };
    for algorithm in ["ES256", "EdDSA", "RS256"] {
        let scene = Scene::new();
        make_key(&scene.keys().join(OLD), algorithm);
        let _agent = scene.lasting_agent(&format!("algorithm: {algorithm}"));
        let consul = Consul::start(&program, &scene);
        let [one, other] = scene.guests() else { panic!("two guests") };
        for (number, guest, stranger) in [(0, one, other), (1, other, one)] {
            let token = consul.log_in(guest, &scene.token(number, AUDIENCES[0])).expect(algorithm);
            let own = consul.read(guest, &token, &secret(guest)).expect(algorithm);
            assert_eq!(own, guest.identity().hostname, "{algorithm}");
            let refused = consul.read(guest, &token, &secret(stranger)).expect_err("a stranger's key");
            assert!(refused.to_string().contains(REFUSED), "{algorithm}: {refused}");
        }
    }
}

#[test]
fn consul_refuses_a_token_for_others_and_one_that_has_ended() {
    let Some(program) = Program::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let _agent = scene.agent("algorithm: ES256", &[]);
    let consul = Consul::start(&program, &scene);
    let guest = &scene.guests()[0];
    let refused = consul.log_in(guest, &scene.token(0, "vault")).expect_err("a token for another");
    assert!(refused.to_string().contains("aud claim does not match"), "{refused}");

    let token = scene.token(0, AUDIENCES[0]);
    std::thread::sleep(Duration::from_secs(LIFETIME));
    eventually(PATIENCE, || {
        let refused = consul.log_in(guest, &token).err().map(|error| error.to_string());
        anyhow::ensure!(refused.as_ref().is_some_and(|why| why.contains("token is expired")), "{refused:?}");
        Ok(())
    })
    .expect("the token has ended");
}

#[test]
fn consul_refuses_a_removed_key_once_it_fetches_the_keys_again() {
    let Some(program) = Program::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.lasting_agent("algorithm: ES256");
    let consul = Consul::start(&program, &scene);
    let guest = &scene.guests()[0];
    let before = scene.token(0, AUDIENCES[0]);
    consul.log_in(guest, &before).expect("the key is published");

    make_key(&scene.keys().join(NEWER), "ES256");
    fs::remove_file(scene.keys().join(OLD)).expect("removed");
    let removed = scene::header(&before)["kid"].clone();
    eventually(PATIENCE, || {
        let keys = scene.published(&agent);
        let keys = keys["keys"].as_array().expect("a list");
        anyhow::ensure!(keys.len() == 1 && keys[0]["kid"] != removed, "{keys:?}");
        Ok(())
    })
    .expect("the removed key is no longer published");
    consul.fetch_keys_again();
    // The guest would get its token of the removed key again for the same audience.
    let after = scene.token(0, AUDIENCES[1]);
    consul.log_in(guest, &after).expect("the new key is published");
    let refused = consul.log_in(guest, &before).expect_err("the key is removed");
    assert!(refused.to_string().contains("failed to verify id token signature"), "{refused}");
}

// Tokens while one agent takes over from another.

#[test]
fn guests_get_tokens_all_through_a_takeover() {
    let Some(libraries) = Libraries::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let first = scene.agent("algorithm: ES256", &[]);
    let before = scene.token(0, AUDIENCE);
    let is_over = AtomicBool::new(false);
    let (next, statuses) = std::thread::scope(|scope| {
        let asks = scope.spawn(|| {
            let mut statuses = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                statuses.push(scene.ask(1, &["-H", "Metadata: true"], "?audience=during").0);
            }
            statuses
        });
        let next = scene.agent("algorithm: ES256", &["--takeover"]);
        let (status, log) = first.ended(PATIENCE).expect("the first agent ends");
        assert!(status.success(), "{log}");
        is_over.store(true, Ordering::Relaxed);
        (next, asks.join().expect("no panic"))
    });
    assert!(!statuses.is_empty() && statuses.iter().all(|status| *status == 200), "{statuses:?}");
    let after = scene.token(0, AUDIENCE);
    let found = scene.verify(libraries, &next, &[(&before, AUDIENCE), (&after, AUDIENCE)]);
    // The first may have ended meanwhile, by its lifetime.
    assert!(found[0].is_object() || found[0] == "ExpiredSignatureError", "{found:?}");
    assert!(found[1].is_object(), "{found:?}");
}
