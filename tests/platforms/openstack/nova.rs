//! A Nova that checks and answers requests as `nova/api/metadata/handler.py` and `password.py` do.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

/// `metadata_proxy_shared_secret`.
pub(super) const SECRET: &str = "s3cr3t";
/// `MAX_SIZE` of `password.py`.
const PASSWORD_BYTES: usize = 1_020;

#[derive(Default)]
struct Cloud {
    instances: BTreeMap<String, NovaInstance>,
    /// Requests with header fields that only a load balancer or a guest would send.
    strangers: Vec<String>,
}

#[derive(Default)]
struct NovaInstance {
    project: String,
    user_data: String,
    password: String,
    addresses: Vec<String>,
}

/// The service. It ends with the test.
pub(super) struct Nova {
    cloud: Arc<Mutex<Cloud>>,
    is_paused: Arc<AtomicBool>,
    url: String,
}

struct NovaRequest {
    method: String,
    path: String,
    fields: BTreeMap<String, String>,
    body: Vec<u8>,
}

fn locked(cloud: &Mutex<Cloud>) -> MutexGuard<'_, Cloud> {
    cloud.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Nova {
    /// Listens in the namespace of this thread.
    pub(super) fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let url = format!("http://{}", listener.local_addr()?);
        let (cloud, is_paused) = (Arc::<Mutex<Cloud>>::default(), Arc::<AtomicBool>::default());
        let (of_server, paused) = (Arc::clone(&cloud), Arc::clone(&is_paused));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (cloud, paused) = (Arc::clone(&of_server), Arc::clone(&paused));
                std::thread::spawn(move || serve(stream, &cloud, &paused));
            }
        });
        Ok(Self { cloud, is_paused, url })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn add(&self, instance: &str, project: &str, user_data: &str) {
        let of =
            NovaInstance { project: project.into(), user_data: user_data.into(), ..NovaInstance::default() };
        locked(&self.cloud).instances.insert(instance.to_owned(), of);
    }

    pub(super) fn set_password(&self, instance: &str, password: &str) {
        if let Some(of) = locked(&self.cloud).instances.get_mut(instance) {
            password.clone_into(&mut of.password);
        }
    }

    /// The addresses that requests of an instance came from, each once.
    pub(super) fn addresses(&self, instance: &str) -> Vec<String> {
        locked(&self.cloud).instances.get(instance).map(|of| of.addresses.clone()).unwrap_or_default()
    }

    pub(super) fn strangers(&self) -> Vec<String> {
        locked(&self.cloud).strangers.clone()
    }

    /// Closes each connection without an answer from now on.
    pub(super) fn pause(&self) {
        self.is_paused.store(true, Ordering::SeqCst);
    }

    pub(super) fn resume(&self) {
        self.is_paused.store(false, Ordering::SeqCst);
    }
}

fn serve(stream: TcpStream, cloud: &Mutex<Cloud>, is_paused: &AtomicBool) {
    let Ok(mut writer) = stream.try_clone() else { return };
    let mut reader = BufReader::new(stream);
    while let Ok(Some(request)) = read(&mut reader) {
        if is_paused.load(Ordering::SeqCst) {
            return;
        }
        let (status, kind, body) = answer(&request, &mut locked(cloud));
        let head = format!(
            "HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nX-Nova: 1\r\n\r\n",
            body.len()
        );
        if writer.write_all(&[head.as_bytes(), &body].concat()).is_err() {
            return;
        }
    }
}

fn read(reader: &mut BufReader<TcpStream>) -> Result<Option<NovaRequest>> {
    let mut line = || -> Result<String> {
        let mut text = String::new();
        reader.read_line(&mut text)?;
        Ok(text.trim_end().to_owned())
    };
    let first = line()?;
    if first.is_empty() {
        return Ok(None);
    }
    let mut words = first.split(' ');
    let method = words.next().context("a method")?.to_owned();
    let target = words.next().context("a target")?;
    let path = target.split('?').next().unwrap_or_default().to_owned();
    let mut fields = BTreeMap::new();
    loop {
        let text = line()?;
        let Some((name, value)) = text.split_once(':') else { break };
        fields.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = fields.get("content-length").map_or(Ok(0), |length| length.parse())?;
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some(NovaRequest { method, path, fields, body }))
}

type NovaAnswer = (u16, &'static str, Vec<u8>);

fn plain(status: u16) -> NovaAnswer {
    (status, "text/html; charset=UTF-8", b"<html>Nova's own page</html>".to_vec())
}

/// `MetadataRequestHandler.__call__`.
fn answer(request: &NovaRequest, cloud: &mut Cloud) -> NovaAnswer {
    let field = |name: &str| request.fields.get(name).cloned();
    if field("x-metadata-provider").is_some()
        || field("user-agent").is_some_and(|agent| agent.contains("curl"))
    {
        cloud.strangers.push(format!("{} {:?}", request.path, request.fields));
        return plain(400);
    }
    // `_handle_instance_id_request`
    let (Some(id), Some(project)) = (field("x-instance-id"), field("x-tenant-id")) else { return plain(400) };
    if field("x-instance-id-signature").is_none_or(|found| found != signature(&id)) {
        return plain(403);
    }
    let Some(of) = cloud.instances.get_mut(&id).filter(|of| of.project == project) else { return plain(404) };
    let address = field("x-forwarded-for").unwrap_or_default();
    if !of.addresses.contains(&address) {
        of.addresses.push(address);
    }
    let text = |text: &str| (200, "text/plain; charset=UTF-8", text.as_bytes().to_vec());
    match &*request.path {
        "/openstack" => text("2012-08-10\nlatest"),
        "/openstack/latest/meta_data.json" => {
            let seed = STANDARD.encode([fastrand::u8(..); 512]);
            let document = json!({"uuid": id, "random_seed": seed, "project_id": project});
            (200, "application/json", document.to_string().into_bytes())
        }
        "/openstack/latest/user_data" => (200, "application/octet-stream", of.user_data.clone().into_bytes()),
        "/latest/meta-data/instance-id" => text(&id),
        // `handle_password`
        "/openstack/latest/password" => match &*request.method {
            "GET" => text(&of.password),
            "POST" if !of.password.is_empty() => plain(409),
            "POST" if request.body.is_empty() || request.body.len() > PASSWORD_BYTES => plain(400),
            "POST" => {
                of.password = String::from_utf8_lossy(&request.body).into_owned();
                (200, "text/html; charset=UTF-8", Vec::new())
            }
            _ => plain(400),
        },
        _ => plain(404),
    }
}

/// `hmac.new(secret, instance_id, hashlib.sha256).hexdigest()`, by openssl(1) and not by the agent's code.
fn signature(instance: &str) -> String {
    let script = format!("printf %s {instance:?} | openssl dgst -sha256 -hmac {SECRET}");
    let output = std::process::Command::new("sh").args(["-c", &script]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.trim().rsplit(' ').next().unwrap_or_default().to_owned()
}
