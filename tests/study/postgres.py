"""A PostgreSQL for the tests: its own folder, its own user, a free port of the loopback, gone when they end."""

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, make_url, text


@contextmanager
def running(programs: Path, folder: Path) -> Iterator[str]:
    """Its address while it runs. PostgreSQL refuses to run as root: then the package's own user runs it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"
    as_user: list[str] = []
    if os.geteuid() == 0:
        account = pwd.getpwnam("postgres")
        for path in (folder, *[p for p in folder.parents if p.owner() == "root" and p != Path("/")]):
            if path != Path("/tmp"):
                path.chmod(path.stat().st_mode | 0o055)
        os.chown(folder, account.pw_uid, account.pw_gid)
        as_user = ["runuser", "-u", "postgres", "--"]
    call = [*as_user, str(programs / "initdb"), "-D", str(data), "-U", "test", "-A", "trust", "-E", "UTF8", "--no-sync"]
    subprocess.run(call, check=True, capture_output=True, cwd=folder)
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    control = [*as_user, str(programs / "pg_ctl"), "-D", str(data), "-w"]
    subprocess.run(
        [*control, "-o", options, "-l", str(folder / "log"), "start"], check=True, capture_output=True, cwd=folder
    )
    try:
        yield f"postgresql://test@127.0.0.1:{port}/postgres"
    finally:
        # another run of the tests may have swept its folder away; a server whose folder is gone ends by itself
        subprocess.run([*control, "-m", "immediate", "stop"], check=False, capture_output=True)
        shutil.rmtree(data, ignore_errors=True)


def another_database(url: str) -> str:
    """An empty database beside one."""
    name = f"test_{os.urandom(4).hex()}"
    address = make_url(url).set(drivername="postgresql+psycopg")
    engine = create_engine(address, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return address.set(database=name).render_as_string(hide_password=False)
