//! Documents that the operator's certificate signs, verified by OpenSSL as EC2 and Azure tell their customers to.

use std::fs;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_base::addresses::ALIYUN;
use serde_json::{Value, json};
use support::eventually::eventually;
use support::guest::{METADATA, NIC};
use support::privileged;

use super::OLD;
use super::authority::{Authority, openssl};
use super::scene::{PATIENCE, Scene, in_memory, make_key};

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

#[test]
fn ec2s_signed_documents_verify_and_name_the_vm_that_asked() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn azures_attested_document_verifies_with_the_guests_nonce() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn aliyuns_detached_signature_verifies_with_the_document_and_the_audience() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_replaced_certificate_signs_without_a_restart() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn without_a_certificate_no_document_is_listed_or_served() {
    if !privileged::or_skip() {
        return;
    }
    let scene = scene();
    let _agent = scene.agent("algorithm: ES256", &[]);
    let listed = text(&scene, 0, &format!("{EC2}/"));
    assert!(
        listed.contains("document") && !listed.contains("pkcs7") && !listed.contains("signature"),
        "{listed}"
    );
    assert_eq!(fetch(&scene, 0, &[], &format!("{EC2}/pkcs7")).0, 404);
}

#[test]
fn an_agent_with_the_key_of_another_certificate_does_not_start_and_says_why() {
    if !privileged::or_skip() {
        return;
    }
    let (scene, authority, other) = (scene(), Authority::new(30), Authority::new(30));
    let ([chain, _], [_, key]) = (authority.files(), other.files());
    let field = format!("certificate: {{chain: '{}', key: '{}'}}", chain.display(), key.display());
    let error = scene.try_agent(&field, &[]).expect_err("two that do not belong together").to_string();
    assert!(error.contains("to be that of the RSA key in"), "{error}");
}

#[test]
fn the_certificates_key_is_in_the_signer_alone_and_each_document_in_the_audit_log() {
    if !privileged::or_skip() {
        return;
    }
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
