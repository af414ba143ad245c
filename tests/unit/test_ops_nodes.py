"""The units of systemd and the manifests of Kubernetes: held against their own tools, and against what workers need."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.ops_files import KUBERNETES, OPS, UNITS, documents, pods, relative, unit


def verify(folder: Path) -> str:
    """What systemd has to say of the units in a folder, with programs that exist in the place of theirs."""
    for file in folder.glob("*.service"):
        file.write_text(re.sub(r"^(Exec\w+=[-+]*)/\S+", r"\1/bin/true", file.read_text(), flags=re.M))
    names = ["batchjobs-worker@0.service", "batchjobs-exporter.service", "batchjobs-workers.target"]
    command = ["systemd-analyze", "verify", "--man=no", *(f"./{name}" for name in names)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"exit code {done.returncode}")


class TestSystemd:
    worker = unit(OPS / "systemd/batchjobs-worker@.service")

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
    def test_systemd_finds_nothing_wrong(self, tmp_path: Path) -> None:
        for file in UNITS:
            shutil.copy(file, tmp_path)
        assert verify(tmp_path) == ""
        damaged = tmp_path / "batchjobs-exporter.service"
        damaged.write_text(damaged.read_text().replace("RestartSec=", "RestartSek="))
        assert "RestartSek" in verify(tmp_path)

    def test_a_worker_keeps_its_name_and_its_gpu(self) -> None:
        (command,) = self.worker["Service.ExecStart"]
        assert "--name %H-gpu%i" in command
        assert "--device cuda:%i" in command
        # Each of these hides the GPU; ProtectClock by way of DeviceAllow.
        keys = {name.split(".")[1] for name in self.worker}
        assert keys.isdisjoint({"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock"})
        assert "MemoryDenyWriteExecute" not in keys  # CUDA makes code while it runs

    def test_each_gpu_has_a_port_of_its_own_which_its_file_can_change(self) -> None:
        assert "BATCHJOBS_METRICS_PORT=940%i" in " ".join(self.worker["Service.Environment"])
        assert self.worker["Service.EnvironmentFile"] == ["/etc/batchjobs/worker.env", "-/etc/batchjobs/worker-%i.env"]
        (exporter,) = unit(OPS / "systemd/batchjobs-exporter.service")["Service.ExecStart"]
        assert exporter.endswith("--port 9410")

    def test_a_drained_worker_stays_ended_and_all_stop_together(self) -> None:
        assert self.worker["Service.Restart"] == ["on-failure"]
        assert self.worker["Unit.PartOf"] == self.worker["Install.WantedBy"] == ["batchjobs-workers.target"]

    @pytest.mark.parametrize("file", [file for file in UNITS if file.suffix == ".service"], ids=relative)
    def test_services_have_few_rights_and_time_to_end(self, file: Path) -> None:
        found = unit(file)
        for key in ("NoNewPrivileges", "PrivateTmp", "ProtectHome"):
            assert found[f"Service.{key}"] == ["yes"], key
        assert found["Service.ProtectSystem"] == ["strict"]
        assert found["Service.User"] == ["batchjobs"]
        assert int(found["Service.TimeoutStopSec"][0]) >= 15


MANIFESTS = sorted(
    {*KUBERNETES.rglob("*.yaml")} - {*KUBERNETES.rglob("kustomization.yaml")} - {KUBERNETES / "trial/cpu.yaml"}
)


def validate(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


class TestKubernetes:
    @pytest.mark.parametrize("file", MANIFESTS, ids=relative)
    def test_manifests_are_valid_and_have_no_namespace(self, file: Path) -> None:
        for resource in documents(file):
            validate(resource)
            assert "namespace" not in resource["metadata"]

    def test_a_mistake_is_found(self) -> None:
        _, stateful_set, _ = documents(KUBERNETES / "base/worker.yaml")
        stateful_set["spec"]["replica"] = 1
        with pytest.raises(kubernetes_validate.ValidationError):
            validate(stateful_set)

    @pytest.mark.parametrize("folder", ["base", "trial"])
    def test_kustomizations_name_every_file(self, folder: str) -> None:
        (kustomization,) = documents(KUBERNETES / folder / "kustomization.yaml")
        named = {*kustomization["resources"], *(patch["path"] for patch in kustomization.get("patches", []))}
        there = {file.name for file in (KUBERNETES / folder).glob("*.yaml")} - {"kustomization.yaml"}
        assert named - {"../base"} == there

    @pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
    @pytest.mark.parametrize(("folder", "gpus"), [("base", True), ("trial", False)])
    def test_kustomize_builds_what_is_valid(self, folder: str, gpus: bool) -> None:
        command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
        built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        resources = list(yaml.safe_load_all(built))
        for resource in resources:
            validate(resource)
        assert ("nvidia.com/gpu" in built) == gpus
        images = {container["image"] for pod in pods(resources) for container in pod["containers"]}
        assert "batchjobs:0.1.0" in images
        assert all(re.search(r":\d+\.\d+", image) for image in images)

    def test_pods_of_ours_have_few_rights(self) -> None:
        ours = [pod for file in MANIFESTS if file.parent.name == "base" for pod in pods(documents(file))]
        assert len(ours) == 3
        for pod in ours:
            assert pod["enableServiceLinks"] is False  # BATCHJOBS_..._PORT of a Service is no setting
            assert pod["securityContext"]["runAsNonRoot"] is True
            for container in pod["containers"]:
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}

    def test_a_worker_keeps_its_name_and_has_time_to_give_back(self) -> None:
        service, stateful_set, budget = documents(KUBERNETES / "base/worker.yaml")
        assert stateful_set["kind"] == "StatefulSet"
        assert stateful_set["spec"]["serviceName"] == service["metadata"]["name"]
        pod = stateful_set["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["args"][-2:] == ["--name", "$(POD_NAME)"]
        assert pod["terminationGracePeriodSeconds"] >= 60
        (config,) = documents(KUBERNETES / "base/config.yaml")
        assert str(container["ports"][0]["containerPort"]) == config["data"]["BATCHJOBS_METRICS_PORT"]
        assert budget["spec"]["selector"] == stateful_set["spec"]["selector"]
