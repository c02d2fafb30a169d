use super::run;
use crate::directory::make;
use crate::documents::CertificateFiles;
use crate::key::Algorithm;
use crate::openssl::Operator;
use crate::wire::{
    PACKET_BYTES, Setup, SignOperation, SignRequest, SignerReply, receive_packet, send_packet,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::path::Path;

fn setup(keys: &Path, rotate_after: Option<u64>) -> Setup {
    let (issuer, algorithm) = ("https://issuer.example".into(), Algorithm::EdDsa);
    Setup {
        issuer,
        keys: keys.into(),
        algorithm,
        lifetime: 60,
        publish_for: 0,
        rotate_after,
        certificate: None,
    }
}

fn started(setup: &Setup) -> (OwnedFd, std::thread::JoinHandle<bool>) {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.expect("a pair");
    send_packet(&ours, setup).expect("sent");
    (ours, std::thread::spawn(move || run(theirs).is_ok()))
}

fn reply(socket: &OwnedFd) -> Option<SignerReply> {
    receive_packet(socket, &mut vec![0; PACKET_BYTES]).expect("a packet")
}

fn ask(socket: &OwnedFd, claims: Value) -> SignerReply {
    let operation = SignOperation::Jwt(claims.as_object().expect("claims").clone());
    send_packet(socket, &SignRequest { id: 7, operation }).expect("sent");
    reply(socket).expect("an answer")
}

#[test]
fn the_signer_publishes_keys_then_signs_until_the_agent_ends() {
    let room = tempfile::tempdir().expect("a directory");
    make(room.path(), Algorithm::EdDsa, 1_000).expect("made");
    let (socket, signer) = started(&setup(room.path(), None));
    let Some(SignerReply::Keys(published)) = reply(&socket) else { panic!("keys come first") };
    assert_eq!(published.signs.as_deref(), published.jwks["keys"][0]["kid"].as_str());
    assert!(!published.jwks.to_string().contains("\"d\""));
    let SignerReply::Token { id: 7, issued, expires, .. } = ask(&socket, json!({"sub": "vm:1", "aud": "a"}))
    else {
        panic!("a token")
    };
    assert_eq!(expires - issued, 60);
    let refused = ask(&socket, json!({"sub": "vm:1", "aud": "a", "exp": 9_999_999_999_u64}));
    assert!(matches!(refused, SignerReply::Refused { id: 7, .. }), "{refused:?}");
    drop(socket);
    assert!(signer.join().expect("no panic"));
}

#[test]
fn a_directory_without_a_key_is_refused_unless_rotation_makes_one() {
    let room = tempfile::tempdir().expect("a directory");
    let (socket, signer) = started(&setup(room.path(), None));
    let Some(SignerReply::Failed { reason }) = reply(&socket) else { panic!("a reason") };
    assert!(reason.contains("xdp-imds identity key"), "{reason}");
    assert!(!signer.join().expect("no panic"));
    for directory in [room.path().to_owned(), room.path().join("new")] {
        let (socket, _) = started(&setup(&directory, Some(3_600)));
        assert!(matches!(reply(&socket), Some(SignerReply::Keys(published)) if published.count == 1));
    }
}

#[test]
fn documents_need_a_certificate_and_name_it() {
    let Some(operator) = Operator::or_skip() else { return };
    let room = tempfile::tempdir().expect("a directory");
    make(room.path(), Algorithm::EdDsa, 1_000).expect("made");
    let text = r#"{"a":1}"#.to_owned();
    let operations = || {
        let statement = json!({"a": 1}).as_object().expect("an object").clone();
        [
            SignOperation::Signature(text.clone()),
            SignOperation::Envelope(text.clone()),
            SignOperation::Detached(text.clone()),
            SignOperation::Attested(statement),
        ]
    };
    for certificate in [None, Some(operator.files())] {
        let signs = certificate.is_some();
        let (socket, _) = started(&Setup { certificate, ..setup(room.path(), None) });
        let Some(SignerReply::Keys(published)) = reply(&socket) else { panic!("keys come first") };
        assert_eq!(published.certificate.is_some(), signs);
        for operation in operations() {
            send_packet(&socket, &SignRequest { id: 9, operation }).expect("sent");
            match reply(&socket) {
                Some(SignerReply::Document { id: 9, certificate, issued, expires, .. }) if signs => {
                    assert_eq!(published.certificate.as_ref().map(|own| &own.thumbprint), Some(&certificate));
                    assert_eq!(expires - issued, 60);
                }
                Some(SignerReply::Refused { id: 9, .. }) if !signs => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_certificate_that_cannot_be_used_is_refused_at_the_start() {
    let room = tempfile::tempdir().expect("a directory");
    make(room.path(), Algorithm::EdDsa, 1_000).expect("made");
    let files = CertificateFiles { chain: room.path().join("chain"), key: room.path().join("key") };
    let (socket, signer) = started(&Setup { certificate: Some(files), ..setup(room.path(), None) });
    let Some(SignerReply::Failed { reason }) = reply(&socket) else { panic!("a reason") };
    assert!(reason.contains("chain"), "{reason}");
    assert!(!signer.join().expect("no panic"));
}
