# A small image with dist-ckpt and without PyTorch: to look at checkpoints, check them, lay them out
# for other ranks and clean up, as a CronJob, beside a job or by hand:
#
#   docker build -f docker/slim.Dockerfile -t dist-ckpt-slim .
#   docker run --rm -v /data/runs:/runs --user "$(id -u):$(id -g)" dist-ckpt-slim ls /runs/a
#
# Run it as the user who owns the checkpoints. What averages, or exports to DCP or torch.load, needs the other image.
FROM python:3.12-slim

COPY pyproject.toml constraints.txt README.md /src/
COPY dist_ckpt /src/dist_ckpt
RUN pip install --no-cache-dir -c /src/constraints.txt /src && rm -r /src

ENTRYPOINT ["dist-ckpt"]
CMD ["--help"]
